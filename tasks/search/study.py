"""Where a search keeps its trials and their results: a database that any process may be killed beside.

Every change is one transaction, and a trial has one row for as long as it lives. So after a kill, trials that were
training are still `running` there, and the search trains these first.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import sqlalchemy as sql
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from configurable.wording import counted
from storage.stages import digest_json
from tasks.config.home import studies_file
from tasks.search.methods.base import SearchMethod, SearchTrial, State, TrialJob

_SEEDS = "/seeds-of-"
"""Between the name of a study and the number of a trial: the trainings of this trial with other seeds."""
_BUSY_S = 60.0
"""Seconds that a transaction waits for those of other processes."""
_DAMAGED = ("malformed", "file is not a database")
"""In SQLite's messages about a damaged file."""
_TABLES = sql.MetaData()
_STUDIES = sql.Table(
    "starling_studies",
    _TABLES,
    sql.Column("name", sql.String(200), primary_key=True),
    sql.Column("content", sql.Text, nullable=False),
    sql.Column("about", sql.Text, nullable=False, default="{}"),
    sql.Column("created", sql.Float, nullable=False),
    sql.Column("stop", sql.Boolean, nullable=False, default=False),
    sql.Column("seconds", sql.Float, nullable=False, default=0.0),
)
_TRIALS = sql.Table(
    "starling_trials",
    _TABLES,
    sql.Column("study", sql.String(200), primary_key=True),
    sql.Column("number", sql.Integer, primary_key=True, autoincrement=False),
    sql.Column("trial_values", sql.Text, nullable=False),
    sql.Column("state", sql.String(10), nullable=False),
    sql.Column("budget", sql.Integer, nullable=False),
    sql.Column("trained", sql.Integer, nullable=False, default=0),
    sql.Column("error", sql.Text, nullable=False, default=""),
    sql.Column("seconds", sql.Float, nullable=False, default=0.0),
)
_RESULTS = sql.Table(
    "starling_results",
    _TABLES,
    sql.Column("study", sql.String(200), primary_key=True),
    sql.Column("number", sql.Integer, primary_key=True, autoincrement=False),
    sql.Column("budget", sql.Integer, primary_key=True, autoincrement=False),
    sql.Column("loss", sql.Float, nullable=False),
    sql.Column("figures", sql.Text, nullable=False),
    sql.Column("at", sql.Float, nullable=False),
)


class StudyError(ValueError):
    """A study cannot be opened, or not for this search; the message has the remedy."""


@dataclass(frozen=True)
class StudyTrial(SearchTrial):
    """A trial with what the study knows besides.

    Attributes:
        trained: The largest budget whose result is known.
        error: Why it failed.
        seconds: Time that it has trained, as far as it is known.
        figures: Of each result, by budget: further figures, and where the training is.
        at: Of each result, by budget: when it came, in seconds since 1970.
    """

    trained: int = 0
    error: str = ""
    seconds: float = 0.0
    figures: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    at: Mapping[int, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A JSON value."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class TrialOutcome(NamedTuple):
    """Result of training a trial to a budget."""

    loss: float
    """What is minimized."""
    figures: Mapping[str, Any] = MappingProxyType({})
    """JSON values to keep with it."""
    seconds: float = 0.0
    """Duration."""


def budget_text(budget: int, unit: str) -> str:
    """A budget with its unit.

    Args:
        budget: The budget.
        unit: What budgets count, in the plural.
    """
    return counted(budget, unit.removesuffix("s"))


def after_text(budget: int, unit: str) -> str:
    """After which budget a result is, with a space before it; empty if nothing is trained."""
    return f" after {budget_text(budget, unit)}" if budget else ""


def studies_url(configured: str = "") -> str:
    """The database: the configured one, $STARLING_STUDIES, or SQLite in the data folder."""
    return configured or os.environ.get("STARLING_STUDIES") or f"sqlite:///{studies_file()}"


class Studies:
    """A database of studies.

    Args:
        url: As SQLAlchemy writes it; by default as `studies_url`.

    Raises:
        StudyError: It cannot be used.
    """

    def __init__(self, url: str = "") -> None:
        self.url = studies_url(url)
        try:
            place = _place(self.url)
            if place.get_backend_name() == "sqlite":
                file = place.database
                if file in (None, "", ":memory:"):
                    raise StudyError(f"{self.url} is a database in memory, which a kill deletes: name a file")
                studies_file().parent.mkdir(exist_ok=True)
            self.engine = sql.create_engine(place, **_options(place))
        except (SQLAlchemyError, ImportError) as error:
            raise StudyError(f"{_shown(self.url)} is no database of studies: {error}; see search.url") from error
        with self._told():
            try:
                _TABLES.create_all(self.engine)
            except SQLAlchemyError:  # another process may have made one of them meanwhile
                _TABLES.create_all(self.engine)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say in one line what a database refuses."""
        try:
            yield
        except SQLAlchemyError as error:
            cause = str(getattr(error, "orig", None) or error).splitlines()[0]
            remedy = "check search.url, $STARLING_STUDIES, and that its folder can be written"
            if any(words in cause for words in _DAMAGED):
                remedy = "restore it (`starling restore`), or move it away: the next search begins a new one"
            raise StudyError(f"the database of studies {_shown(self.url)} cannot be used: {cause}; {remedy}") from error

    def names(self) -> list[str]:
        """The studies of searches, the newest first."""
        names = sql.select(_STUDIES.c.name).where(~_STUDIES.c.name.contains(_SEEDS)).order_by(_STUDIES.c.created.desc())
        with self._told(), self.engine.begin() as connection:
            return list(connection.scalars(names))

    def create(self, name: str, content: Mapping[str, Any], about: Mapping[str, Any] | None = None) -> "Study":
        """The study of a search, made if it is new; one that was to stop goes on.

        Args:
            name: Its name.
            content: All that its results depend on, as JSON.
            about: What may change from one run of the search to the next, such as limits, as JSON.

        Raises:
            StudyError: There is one of this name with another content.
        """
        said = json.dumps(about or {})
        row = {"name": name, "content": json.dumps(content), "about": said, "created": time.time()}
        with self._told(), suppress(IntegrityError), self.engine.begin() as connection:  # it may be there already
            connection.execute(_STUDIES.insert().values(row))
        study = self.open(name)
        if changed := _changed(study.content, content):
            raise StudyError(
                f"the study {name} was made with another {' and another '.join(changed)}, so its results cannot be "
                "continued: give the search another name (search.study), or restore the former configuration"
            )
        with self._told(), self.engine.begin() as connection:
            connection.execute(_STUDIES.update().where(_STUDIES.c.name == name).values(stop=False, about=said))
        study.about = json.loads(said)
        return study

    def open(self, name: str) -> "Study":
        """A study that there is.

        Raises:
            StudyError: There is none of this name.
        """
        study = self.find(name)
        if study is None:
            names = self.names()
            known = f"there are: {', '.join(names[:20])}" if names else "there is none yet: `starling search CONFIG`"
            raise StudyError(f"there is no study {name!r}; {known}")
        return study

    def find(self, name: str) -> "Study | None":
        """A study if it exists."""
        with self._told(), self.engine.begin() as connection:
            row = connection.execute(sql.select(_STUDIES).where(_STUDIES.c.name == name)).one_or_none()
        if row is None:
            return None
        return Study(self, name, json.loads(row.content), json.loads(row.about), row.created, row.seconds)


def _place(url: str) -> sql.URL:
    """A database's address; that of $STARLING_STUDIES with $STARLING_STUDIES_PASSWORD, unless it has a password."""
    place, secret = sql.make_url(url), os.environ.get("STARLING_STUDIES_PASSWORD")
    lacking = place.username and place.password is None and url == os.environ.get("STARLING_STUDIES")
    return place.set(password=secret) if secret and lacking else place


def _options(place: sql.URL) -> dict[str, Any]:
    return {"connect_args": {"timeout": _BUSY_S}} if place.get_backend_name() == "sqlite" else {"pool_pre_ping": True}


def _shown(url: str) -> str:
    """Without a password."""
    try:
        return sql.make_url(url).render_as_string(hide_password=True)
    except SQLAlchemyError:
        return "search.url"


def _changed(former: Any, present: Any) -> list[str]:
    """Parts of a study's content that differ."""
    names = [*former, *(name for name in present if name not in former)]
    # as JSON: a tuple and a list are the same
    return [name for name in names if digest_json({"": former.get(name)}) != digest_json({"": present.get(name)})]


class Study:
    """The trials of one search.

    Args:
        studies: The database.
        name: The study.
        content: What its results depend on.
        about: The limits of the last run.
        created: When it was made, in seconds since 1970.
        seconds: How long it has been searched in.

    Attributes:
        trials: All trials by number, as this process knows them.
    """

    def __init__(self, studies: Studies, name: str, content: Any, about: Any, created: float, seconds: float) -> None:
        self.studies, self.name, self.content, self.about = studies, name, content, about
        self.created, self.seconds = created, seconds
        self.trials: list[StudyTrial] = []
        self.read()

    def read(self) -> None:
        """Read all trials from the database.

        Raises:
            StudyError: The database cannot be used.
        """
        mine = _RESULTS.c.study == self.name
        with self._change() as run:
            trials = run(sql.select(_TRIALS).where(_TRIALS.c.study == self.name).order_by(_TRIALS.c.number)).all()
            results = run(sql.select(_RESULTS).where(mine).order_by(_RESULTS.c.budget)).all()
        losses: dict[int, dict[int, float]] = {}
        figures: dict[int, dict[int, dict[str, Any]]] = {}
        at: dict[int, dict[int, float]] = {}
        for row in results:
            losses.setdefault(row.number, {})[row.budget] = row.loss
            figures.setdefault(row.number, {})[row.budget] = json.loads(row.figures)
            at.setdefault(row.number, {})[row.budget] = row.at
        self.trials = [
            StudyTrial(
                number=row.number,
                values=json.loads(row.trial_values),
                state=row.state,
                budget=row.budget,
                losses=losses.get(row.number, {}),
                trained=row.trained,
                error=row.error,
                seconds=row.seconds,
                figures=figures.get(row.number, {}),
                at=at.get(row.number, {}),
            )
            for row in trials
        ]

    def seeds_of(self, number: int) -> "Study | None":
        """The trainings of a trial's configuration with other seeds, if there are any.

        Args:
            number: The trial.
        """
        return self.studies.find(f"{self.name}{_SEEDS}{number}")

    def make_seeds(self, number: int, method: SearchMethod, largest: int) -> "Study":
        """The trainings of a trial's configuration with other seeds, made if they are new.

        Args:
            number: The trial.
            method: Says which seeds.
            largest: Budget of each.
        """
        content = {"values": self.trials[number].values, "largest": largest}
        about = {"method": "seeds", "trials": method.total, "work": method.work, "largest": largest}
        about |= {"minimize": self.minimized, "budget": self.unit}
        return self.studies.create(f"{self.name}{_SEEDS}{number}", content, about)

    @property
    def trains(self) -> bool:
        """Whether its trials train; those of a search over `decode` do not."""
        return bool(self.about.get("largest") != 0)

    @property
    def unit(self) -> str:
        """What budgets count: `epochs`, `utterances` or `minutes`."""
        return str(self.about.get("budget") or "epochs")

    @property
    def minimized(self) -> str:
        """What is minimized: `loss` or `wer`."""
        return str(self.about.get("minimize") or self.content.get("minimize") or "loss")

    @property
    def interrupted(self) -> list[TrialJob]:
        """Jobs whose trials are running: after a kill, those to do first."""
        return [TrialJob(trial.number, trial.values, trial.budget) for trial in self.trials if trial.state == "running"]

    @property
    def best(self) -> StudyTrial | None:
        """The trial with the lowest loss after the largest budget that any has reached; None without results."""
        there = [trial for trial in self.trials if trial.losses]
        return min(there, key=lambda t: (-max(t.losses), t.losses[max(t.losses)], t.number), default=None)

    def begin(self, job: TrialJob) -> None:
        """Note that a trial trains, before it does.

        Raises:
            StudyError: Another process has begun it.
        """
        with self._change() as run:
            if job.number == len(self.trials):
                row = {"study": self.name, "number": job.number, "trial_values": json.dumps(job.values)}
                try:
                    run(_TRIALS.insert().values(row | {"state": "running", "budget": job.budget}))
                except IntegrityError as error:
                    raise self._taken(job.number) from error
                self.trials.append(StudyTrial(job.number, job.values, "running", job.budget))
                return
        self._set(job.number, "paused", state="running", budget=job.budget)

    def report(self, job: TrialJob, outcome: TrialOutcome, state: State) -> None:
        """Note a result.

        Args:
            job: What was trained.
            outcome: The result; finite.
            state: `paused` or `finished`.
        """
        trial = self.trials[job.number]
        row = {"study": self.name, "number": job.number, "budget": job.budget, "loss": outcome.loss}
        row |= {"figures": json.dumps(dict(outcome.figures)), "at": (now := time.time())}
        changes = {"state": state, "trained": job.budget, "seconds": trial.seconds + outcome.seconds}
        self._set(job.number, "running", _RESULTS.insert().values(row), **changes)
        self.trials[job.number] = replace(
            self.trials[job.number],
            losses={**trial.losses, job.budget: outcome.loss},
            figures={**trial.figures, job.budget: dict(outcome.figures)},
            at={**trial.at, job.budget: now},
        )

    def note_figures(self, number: int, **figures: Any) -> None:
        """Keep more figures with a trial's last result.

        Args:
            number: The trial.
            **figures: JSON values by name.
        """
        trial, results = self.trials[number], _RESULTS.c
        known = {**trial.figures[trial.trained], **figures}
        mine = (results.study == self.name) & (results.number == number) & (results.budget == trial.trained)
        with self._change() as run:
            run(_RESULTS.update().where(mine).values(figures=json.dumps(known)))
        self.trials[number] = replace(trial, figures={**trial.figures, trial.trained: known})

    def fail(self, job: TrialJob, error: str, seconds: float = 0.0) -> None:
        """Note that a trial has failed for good."""
        spent = self.trials[job.number].seconds + seconds
        self._set(job.number, "running", state="failed", error=error, seconds=spent)

    def note_seconds(self, seconds: float) -> None:
        """Note how long the study has been searched in."""
        self.seconds = seconds
        with self._change() as run:
            run(_STUDIES.update().where(_STUDIES.c.name == self.name).values(seconds=seconds))

    def ask_to_stop(self) -> None:
        """Ask the search to begin nothing more."""
        with self._change() as run:
            run(_STUDIES.update().where(_STUDIES.c.name == self.name).values(stop=True))

    @property
    def stopping(self) -> bool:
        """Whether the search, or for trainings with other seeds the one that they belong to, was asked to stop."""
        names = {self.name, self.name.partition(_SEEDS)[0]}
        with self._change() as run:
            return any(run(sql.select(_STUDIES.c.stop).where(_STUDIES.c.name.in_(names))).scalars())

    def _set(self, number: int, before: State, also: Any = None, **changes: Any) -> None:
        """Change a trial, if it is in the state that this process knows, and write something else with it."""
        mine = (_TRIALS.c.study == self.name) & (_TRIALS.c.number == number) & (_TRIALS.c.state == before)
        with self._change() as run:
            if run(_TRIALS.update().where(mine).values(changes)).rowcount != 1:
                raise self._taken(number)
            if also is not None:
                run(also)
        self.trials[number] = replace(self.trials[number], **changes)

    def _taken(self, number: int) -> StudyError:
        return StudyError(
            f"trial {number} of the study {self.name} was changed by another process: one search at a time works on a "
            "study; wait until the other has ended, or give this one another name (search.study)"
        )

    @contextmanager
    def _change(self) -> Iterator[Callable[..., Any]]:
        with self.studies._told(), self.studies.engine.begin() as connection:
            yield connection.execute
