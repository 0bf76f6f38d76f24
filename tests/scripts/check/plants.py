"""Defects that tests plant in a worker's process, and the models that they need no weights for."""

import os
import time
import types

from scripts.attacks import worker


def attacked_by(attack):
    """The only kind of case is `attack(scene)`, on a model that is none."""
    model = types.SimpleNamespace(generate=lambda *given: None, close=lambda: None)
    worker.start = lambda options: model
    worker.record = lambda llm: types.SimpleNamespace(prompts=(), params=())
    worker.check_engine = lambda scene: None
    worker.KINDS = {kind: (weight, attack) for kind, (weight, _) in worker.KINDS.items()}


def nothing():
    attacked_by(lambda scene: None)


def hang():
    attacked_by(lambda scene: scene.call("a call that hangs", lambda: time.sleep(10_000)))


def death():
    def attack(scene):
        scene.began("a call that aborts")
        os.abort()

    attacked_by(attack)


def resident():
    """More than twice the normal memory, below the bound of the process."""

    def attack(scene):
        scene.call("a call that eats memory", lambda: None)

    attacked_by(attack)
    worker.MEMORY = 0.5
    worker.Host._bound = lambda host: setattr(host, "normal", worker.status_bytes("VmRSS"))


def wrong_type():
    attacked_by(lambda scene: scene.call("a call", lambda: 2**2000 / 3.0))
