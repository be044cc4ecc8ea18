"""Changes a document on its own level: fields, members, numbers, texts. What comes out is canonical and has the digest it should have.

Bytes that libFuzzer changes hardly ever get through the digest of a record, or past its closing brace; these do.
"""

from __future__ import annotations

import copy
import json
import random

from tests.hostile.forge import Json, dump, seal
from tests.hostile.mutations import WORDS

_WORDS = (*WORDS[:-4], "", {}, [], [0], {"leaf": 0}, {"dict": []}, {"tuple": [1]}, {"int": str(2**60)})


def mutate_json(data: bytes, chance: random.Random) -> bytes:
    """A few changes of the document, written canonically, with the digest that it should have."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return data
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        document = _mutated(document, chance)
    try:
        return dump(seal(document))
    except (ValueError, RecursionError, TypeError):
        return data


def _mutated(node: Json, chance: random.Random) -> Json:
    """One change somewhere below, or here."""
    if isinstance(node, dict) and node and chance.random() < 0.9:
        name = chance.choice(sorted(node))
        kind = chance.random()
        if kind < 0.08:
            node.pop(name)
        elif kind < 0.12:
            node[chance.choice(sorted(node)) + chance.choice(("", "x", "/", "é"))] = node[name]
        else:
            node[name] = _mutated(node[name], chance)
        return node
    if isinstance(node, list) and node and chance.random() < 0.9:
        place = chance.randrange(len(node))
        kind = chance.random()
        if kind < 0.08:
            node.pop(place)
        elif kind < 0.16:
            node.insert(place, json.loads(json.dumps(chance.choice(node))))
        elif kind < 0.24:
            other = chance.randrange(len(node))
            node[place], node[other] = node[other], node[place]
        else:
            node[place] = _mutated(node[place], chance)
        return node
    return _scalar(node, chance)


def _scalar(node: Json, chance: random.Random) -> Json:
    if isinstance(node, bool) or chance.random() < 0.15:
        return copy.deepcopy(chance.choice(_WORDS))  # or the next change would change the word
    if isinstance(node, int | float):
        return chance.choice((node + 1, node - 1, -node, node * 2, node // 2, 0, 4096, node + 4096, 2**53 - 1, float(node), 64))
    if isinstance(node, str) and node:
        place = chance.randrange(len(node))
        return node[:place] + chance.choice(("", "0", "1", "A", "a", "/", "..", "\n", "é", "nan", node[:8])) + node[place + 1 :]
    return chance.choice(("", 0, 1, -1, None, True))
