"""Run the workers of one machine that belongs to no cluster: join, run the init script, start launchers, report.

Served by the service as one file and started as `python3 agent.pyz --url URL --machine ID --token-file FILE`. Standard
library only, and Python 3.8 is enough. It is level-triggered: the service says which workers the machine has to run,
and what it starts and ends follows from that and from what runs. Everything it has to remember is in a folder, so that
an agent that is killed and started again takes over the launchers of the one before.
"""
