"""Search for good settings with Optuna: each trial is a job; those over quota make way for the owners.

Run it in a notebook (`%run sweep.py`) or a terminal of the portal. The study is kept in the folder `sweep`. When this
is stopped, its jobs go on: run it again, and it continues with them.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import makeway
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

TRIALS = int(os.environ.get("TRIALS", "20"))
AT_ONCE = int(os.environ.get("AT_ONCE", "8"))
EPOCHS = os.environ.get("EPOCHS", "20")
NAME = "sweep"

TRAIN = """
import os
import torch
from data import Pictures
from makeway import checkpoint
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
loader = DataLoader(Pictures(320), batch_size=32, shuffle=True)
state = checkpoint.torch_state(model=model, optimizer=optimizer, every="5m")
for epoch in state.epochs(int(os.environ["EPOCHS"])):
    for pictures, shapes in state.batches(loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(pictures), shapes)
        loss.backward()
        optimizer.step()
        checkpoint.report(loss=loss)

validation = Pictures(96, seed=1)
pictures, shapes = next(iter(DataLoader(validation, batch_size=len(validation))))
nn.functional.cross_entropy(model(pictures), shapes).item()
"""
"""What a trial runs; its result is the last line"""


def job_of(trial: int) -> makeway.Job | None:
    """Return the job of a trial, by its name; None if the search was stopped before it submitted one."""
    try:
        return makeway.job(f"{NAME}-{trial}")
    except makeway.Refused as refused:
        if refused.status != 404:
            raise
        return None


def start(trial: optuna.Trial) -> makeway.Job:
    """Submit the job of a new trial."""
    settings = {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True), "width": trial.suggest_int("width", 8, 64)}
    job = makeway.submit(
        TRAIN,
        name=f"{NAME}-{trial.number}",
        variables=settings,
        files=["data.py"],
        env={"EPOCHS": EPOCHS},
        profile="gpu1",
    )
    trial.set_user_attr("job", job.id)
    return job


folder = Path("sweep")
folder.mkdir(exist_ok=True)
study = optuna.create_study(
    storage=JournalStorage(JournalFileBackend(str(folder / "journal"))),
    study_name=NAME,
    sampler=optuna.samplers.TPESampler(seed=0, constant_liar=True),  # trials that run count as bad ones meanwhile
    load_if_exists=True,
)

running: dict[int, makeway.Job] = {}
for trial in study.get_trials(states=[TrialState.RUNNING]):  # of a run of this file that was stopped
    if (job := job_of(trial.number)) is not None:
        running[trial.number] = job
    else:
        study.tell(trial.number, state=TrialState.FAIL)

while True:
    while len(running) < AT_ONCE and len(study.trials) < TRIALS:
        asked = study.ask()
        running[asked.number] = start(asked)
    if not running:
        break
    for number, job in [*running.items()]:
        if not job.done:
            continue
        del running[number]
        try:
            study.tell(number, job.result())
        except makeway.JobError as error:
            study.tell(number, state=TrialState.FAIL)
            print(f"trial {number} failed: {error}", flush=True)
        else:
            print(f"trial {number}: {study.trials[number].value:.4f}, made way {job.preemptions} times", flush=True)
    time.sleep(1)

print(f"best of {len(study.trials)}: {study.best_value:.4f} with {study.best_params}")
