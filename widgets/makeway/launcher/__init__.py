"""Run one attempt of a job as its parent: start it once, keep its log, pass on the notice, report its end.

Run by a backend as `python -m makeway.launcher ORDER`, or by the path of this folder (`python …/launcher ORDER`), also
of a copy of it: standard library only, and Python 3.8 is enough, because it runs inside images of any kind.
ORDER is a file (or `-` for standard input): one line of JSON, followed by the bytes of the files to write.
With `--remote` it gets order and files by HTTP instead, for the worker that its environment names.
SIGTERM, or a `notice.json` beside the attempt's files, preempts the job. As process 1 of a container it reaps every
orphan.
"""
