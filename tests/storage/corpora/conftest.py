"""The readers' contract suite, for the tests beside it."""

import pytest
from support import load_beside

pytest.register_assert_rewrite("corpus_contract")


load_beside(__file__, "corpus_contract.py")
