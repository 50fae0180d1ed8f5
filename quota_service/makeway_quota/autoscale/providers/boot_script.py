"""Render the first-boot script (user data) of a cloud machine, which joins it to Makeway.

The script downloads the agent from the service, runs it until the machine is not needed any more, and powers the
machine off, which terminates the instance. Its only secret is the join token, which is void once the machine is ready.
"""

from __future__ import annotations

import shlex
from string import Template

from ..provider import JoinData

MAX_USER_DATA_BYTES = 16_384
"""The limit of AWS for user data; Makeway keeps to it everywhere"""

SCRIPT = Template("""\
#!/bin/sh
# Written by Makeway: makes this machine one of the deployment $deployment.
set -eu
umask 077
home="$${1:-/var/lib/makeway}"
mkdir -p "$$home"
printf '%s' $token >"$$home/join-token"
cat >"$$home/machine" <<'END_OF_FILE'
#!/bin/sh
# Runs the agent until this machine is not needed any more, and then powers it off.
cd "$$(dirname "$$0")" || exit 1
umask 077
uptime_seconds() { cut -d. -f1 /proc/uptime; }
download() {
    python3 -I -c 'import sys, urllib.request, zipfile
with urllib.request.urlopen(sys.argv[1], timeout=30) as answer, open("agent.part", "wb") as file:
    file.write(answer.read())
if not zipfile.is_zipfile("agent.part"):
    sys.exit("not the agent: a proxy may have answered")' $agent_url && mv agent.part agent.pyz
}
agent= stopping=
trap 'stopping=1; [ -z "$$agent" ] || kill -TERM "$$agent"' TERM
failing_since=$$(uptime_seconds)
while [ -z "$$stopping" ] && [ $$(($$(uptime_seconds) - failing_since)) -lt $orphan_after ]; do
    began=$$(uptime_seconds)
    if [ -s agent.pyz ] || download; then
        python3 -I agent.pyz $options &
        agent=$$!
        wait "$$agent"
        code=$$?
        while kill -0 "$$agent" 2>/dev/null; do
            wait "$$agent"
            code=$$?
        done
        agent=
        [ "$$code" -ne 0 ] || break
        [ $$(($$(uptime_seconds) - began)) -lt 60 ] || failing_since=$$(uptime_seconds)
    fi
    [ -n "$$stopping" ] || sleep 2
done
[ -n "$$stopping" ] || poweroff || shutdown -h now
END_OF_FILE
if [ -d /run/systemd/system ] && [ $$# -eq 0 ]; then
    cat >/etc/systemd/system/makeway-agent.service <<'END_OF_FILE'
[Unit]
Description=Agent of Makeway
Wants=network-online.target
After=network-online.target
[Service]
ExecStart=/bin/sh /var/lib/makeway/machine
Restart=on-failure
KillMode=mixed
TimeoutStopSec=180
StandardOutput=journal+console
StandardError=journal+console
[Install]
WantedBy=multi-user.target
END_OF_FILE
    systemctl daemon-reload
    systemctl enable makeway-agent.service
    systemctl start --no-block makeway-agent.service
else
    setsid /bin/sh "$$home/machine" </dev/null &
fi
""")


def boot_script(join: JoinData, machine: str, deployment: str, orphan_after: float, spot: str = "") -> str:
    """Return the script; it is deterministic, as a repeated launch must have equal bytes.

    `orphan_after`: seconds without the service (agent) or with a failing agent (script) after which the machine powers
    off. `spot`: the provider whose metadata service the agent polls for spot interruption notices, "" for none. The
    script takes a folder as an optional argument: it keeps all files there then, and installs no systemd unit.
    """
    options = ["--url", join.url, "--machine", machine, "--token-file", "join-token", "--state", "agent"]
    options += ["--orphan-after", str(int(orphan_after)), *(["--spot", spot] if spot else [])]
    return SCRIPT.substitute(
        deployment=deployment,
        token=shlex.quote(join.token),
        agent_url=shlex.quote(f"{join.url}/api/v1/agents/agent.pyz"),
        options=shlex.join(options),
        orphan_after=max(60, int(orphan_after)),
    )
