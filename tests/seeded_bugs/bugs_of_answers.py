"""What the bucket answers, and what that proves."""

from __future__ import annotations

from tests.seeded_bugs.bug import LIVES, Known, SeededBug, nodes

READBACK = "tieredckpt/store/readback.py"

BUGS = (
    SeededBug(
        "read-back removed",
        READBACK,
        "                return Won()\n        except",
        '                return Won()\n            return Lost(b"")\n        except',
        (nodes("tests/store/test_readback.py"), LIVES),
    ),
    SeededBug(
        "write id ignored on 412",
        READBACK,
        "    return Won() if found == data else Lost(found)\n",
        "    return Lost(found)\n",
        (nodes("tests/store/test_readback.py", "tests/engine/test_log.py"), LIVES),
        Known.NO_WRITE_ID,
    ),
    SeededBug(
        "a foreign object taken for ours",
        READBACK,
        "    return Won() if found == data else Lost(found)\n",
        "    return Won()\n",
        (nodes("tests/store/test_readback.py", "tests/engine/test_log.py"), LIVES),
    ),
    SeededBug(
        "409 taken for 412",
        "tieredckpt/store/s3.py",
        "_EXISTS = frozenset({412, 304})",
        "_EXISTS = frozenset({412, 304, 409})",
        (nodes("tests/store/test_s3.py"),),
        Known.CONFLICT_FOR_EXISTS,
        blind="its bucket speaks no HTTP",
    ),
    SeededBug(
        "cleanup on unknown",
        READBACK,
        "            raise _unknown(store, key, undecided) from undecided\n",
        "            store.delete([key])\n            raise _unknown(store, key, undecided) from undecided\n",
        (
            nodes(
                "tests/engine/test_faults_conditional.py::test_c25_an_unknown_commit_is_reported_and_found_committed_by_the_next_save"
            ),
        ),
        Known.CLEANUP_ON_UNKNOWN,
        blind="not within 150 seeds",
    ),
    SeededBug(
        "what may have been committed is cleaned up",
        "tieredckpt/engine/background.py",
        "        if _is_decided(error):\n",
        "        if error.args:\n",
        (nodes("tests/engine/test_leftovers.py"), LIVES),
        Known.CLEANUP_ON_UNKNOWN,
    ),
    SeededBug(
        "list error taken for empty",
        "tieredckpt/engine/log_reader.py",
        "        last = self._last_listed(state.seq)\n",
        "        try:\n            last = self._last_listed(state.seq)\n        except StoreError:\n            return state\n",
        (nodes("tests/engine/test_log_reading.py::test_failed_list_is_not_an_empty_log", "tests/engine/test_faults_outage.py"),),
        Known.LIST_ERROR,
        blind="not within 75 seeds",
    ),
    SeededBug(
        "bucket out of reach taken for a new one",
        "tieredckpt/engine/tier.py",
        "a limit of its own\n    except NotFoundError:\n",
        "a limit of its own\n    except (NotFoundError, StoreError):\n",
        (nodes("tests/engine/test_open_out_of_reach.py"),),
        blind="not within 75 seeds",
    ),
    SeededBug(
        "credentials in repr",
        "tieredckpt/store/secret.py",
        '        return "***"\n',
        "        return repr(self._text)\n",
        (nodes("tests/store/test_url.py::test_c145_a_secret_never_shows"),),
        Known.CREDENTIALS_SHOWN,
        blind="its bucket asks for no credentials",
    ),
    SeededBug(
        "an attempt of unknown fate is forgotten",
        "tieredckpt/engine/log.py",
        "        landed = self._find_landed(state)\n",
        "        landed = None\n",
        (nodes("tests/engine/test_log.py"),),
        blind="not within 75 seeds",
    ),
)
