"""Try from inside a pod what can be reached, and with which token; programs of pods that let others try."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kube_cluster import programs
from kube_cluster.cluster import Cluster
from kube_cluster.network import Network

METADATA = "169.254.169.254"
"""The address by which pods of a cloud's machine learn its credentials."""
REFUSED = "No route to host"
"""What a connection ends with that the test cluster's network policies refuse; nothing listens: Connection refused."""

PROBE = """
import http.client, json, os, socket, sys, urllib.parse

def tried(asked):
    try:
        if "url" not in asked:
            host, port = asked["to"].rsplit(":", 1)
            socket.create_connection((host, int(port)), 10).close()
            return {"open": True}
        url = urllib.parse.urlsplit(asked["url"])
        connection = http.client.HTTPConnection(url.hostname, url.port or 80, timeout=20)
        headers = {"Authorization": asked["token"]} if asked.get("token") else {}
        body = json.dumps(asked["body"]) if "body" in asked else None
        if body:
            headers["Content-Type"] = "application/json"
        path = url.path + ("?" + url.query if url.query else "")
        connection.request(asked.get("method", "GET"), path, body, headers)
        answer = connection.getresponse()
        return {"status": answer.status, "text": answer.read(20000).decode(errors="replace")}
    except OSError as problem:
        return {"problem": problem.strerror or str(problem)}

def answers(questions):
    return {name: tried(asked) for name, asked in questions.items()}
"""
ONCE = f"{PROBE}\nprint(json.dumps(answers(json.loads(sys.argv[1]))))"
"""Answers the questions of its argument."""
LISTEN = """
import http.server, sys

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"secrets of the machine")

http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Answer).serve_forever()
"""

Questions = Mapping[str, Mapping[str, Any]]
Answers = dict[str, dict[str, Any]]


def in_pod(cluster: Cluster, namespace: str, pod: str, questions: Questions) -> Answers:
    """Return what a program in a pod finds."""
    command = ["python3", "-c", ONCE, json.dumps(questions)]
    return _answers([*_exec(cluster, namespace, pod), *command])


def output_in_pod(cluster: Cluster, namespace: str, pod: str, code: str) -> str:
    """Return what a Python program prints in a pod."""
    command = [*_exec(cluster, namespace, pod), "python3", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def on_node(cluster: Cluster, questions: Questions) -> Answers:
    """Return what a program finds in the network of the first node, which no policy covers."""
    return _answers([*_on_node(cluster), "python3", "-c", ONCE, json.dumps(questions)])


@contextmanager
def metadata_server(cluster: Cluster) -> Iterator[None]:
    """Make the first node answer at the metadata address of clouds, as a cloud's network does."""
    node = _network(cluster).namespace(0)
    address = [f"{METADATA}/32", "dev", "lo"]
    subprocess.run(["ip", "-n", node, "address", "add", *address], check=True)
    with subprocess.Popen([*_on_node(cluster), "python3", "-c", LISTEN, METADATA, "80"]) as server:
        try:
            yield
        finally:
            server.kill()
    subprocess.run(["ip", "-n", node, "address", "delete", *address], check=True)


def address_of_node(cluster: Cluster) -> str:
    """Return the address of the first node."""
    return _network(cluster).address(0)


def address_of_machine(cluster: Cluster) -> str:
    """Return the address at which this machine, and its API server, are reached by pods."""
    return _network(cluster).host


def _network(cluster: Cluster) -> Network:
    return Network(int(cluster.folder.facts()["network"]))


def _on_node(cluster: Cluster) -> list[str]:
    return ["ip", "netns", "exec", _network(cluster).namespace(0)]


def _exec(cluster: Cluster, namespace: str, pod: str) -> list[str | Path]:
    return [programs.kubectl(), f"--kubeconfig={cluster.kubeconfig}", "--namespace", namespace, "exec", pod, "--"]


def _answers(command: list[Any]) -> Answers:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: Answers = json.loads(done.stdout)
    return result
