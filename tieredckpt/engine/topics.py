"""What ranks do in an exchange, in words.

Between `council`, where topics are keys on the board, and the people who read its errors: "call-1/6-match" tells them nothing.
"""

from __future__ import annotations

_IN_WORDS = {
    "open-tiers": "while the ranks opened their tiers",
    "before": "when the call began",
    "open": "while the ranks told what their logs say",
    "opened": "while the session was entered in the logs",
    "online": "while rank 0 tried to reach the bucket",
    "look": "while the ranks looked for snapshots",
    "choose": "while the ranks agreed on what to restore",
    "manifest": "while the manifest was read",
    "match": "while the ranks compared their targets with the snapshot",
    "resume": "while rank 0 entered in the log what the run goes on from",
    "resumed": "while the nodes entered in their logs what the run goes on from",
    "share": "while the ranks of each node divided what they read",
    "room": "while the nodes made room for what their ranks share",
    "apart": "while the ranks made room, each for itself",
    "memory": "while the ranks made room in memory for what they read",
    "land": "while the ranks read the snapshot",
    "pass": "while the nodes passed on what others lack",
    "has": "while the ranks told what of the snapshot they have",
    "packs": "while the ranks filled the local tiers again",
    "adopt": "while the nodes adopted the snapshot",
    "mark": "while damage was entered in the logs",
    "load": "while the ranks loaded the state",
    "agree": "while the ranks agreed on the save",
    "describe": "while the ranks told what they save",
    "written": "while the ranks wrote their parts",
    "commit": "while the nodes committed it",
}
"""By the last part of the topic that is a word: behind numbers, and what follows within one procedure."""


_LONG_WORK = frozenset({"written", "land", "pass", "packs", "load"})


def is_long_work(topic: str) -> bool:
    """Do ranks answer when a work is done that may take minutes, and not at once?"""
    return any(part.lstrip("0123456789-") in _LONG_WORK for part in topic.split("/"))


def in_words(topic: str) -> str:
    """For people, to be put behind what happened; the topic itself if it has no words here."""
    parts = (part.lstrip("0123456789-") for part in reversed(topic.split("/")))
    return next((_IN_WORDS[part] for part in parts if part in _IN_WORDS), topic)
