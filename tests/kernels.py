"""Run cells in a kernel of a notebook server, through its WebSocket."""

from __future__ import annotations

import json
import uuid
from typing import Any

import websocket


def execute(socket: websocket.WebSocket, cell: str) -> str:
    """Send one cell and gather what it prints until it is done."""
    id = uuid.uuid4().hex
    header = {
        "msg_id": id,
        "msg_type": "execute_request",
        "username": "",
        "session": uuid.uuid4().hex,
        "version": "5.3",
    }
    content = {"code": cell, "silent": False, "store_history": False, "allow_stdin": False}
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
    socket.send(json.dumps(message))
    printed, replied, idle = "", False, False
    while not (replied and idle):
        answer: dict[str, Any] = json.loads(socket.recv())
        if answer["parent_header"].get("msg_id") != id:
            continue
        kind, content = answer["msg_type"], answer["content"]
        assert kind != "error", "\n".join(content["traceback"])
        printed += content["text"] if kind == "stream" else ""
        replied = replied or kind == "execute_reply"
        idle = idle or (kind == "status" and content["execution_state"] == "idle")
    return printed
