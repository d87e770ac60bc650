"""The guards that `make mutants` takes out are where it looks for them, so that a rename does not rot it unseen."""

from pathlib import Path

import pytest

from tools import mutants

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: f"{Path(mutant.file).stem}-{mutant.guard}")
def test_a_guard_stands_where_its_mutant_says(mutant: mutants.Mutant) -> None:
    assert mutant.guard in (ROOT / mutant.file).read_text()
    assert mutant.guard != mutant.without
    assert (ROOT / "tests" / "contract" / mutant.test).exists()
