"""The parent of every job: starts it once, keeps its log, asks it to make way, and reports how it ended.

Run by a backend as `python -m makeway.launcher ORDER`, or by the path of this folder (`python …/launcher ORDER`), also
of a copy of it: standard library only, and Python 3.8 is enough, because it runs inside other people's images.
ORDER is a file (or `-` for standard input): one line of JSON, followed by the bytes of the files to lay out.
SIGTERM, or a `notice.json` beside the attempt's files, asks the job to make way. As process 1 of a container it
collects every orphan.
"""
