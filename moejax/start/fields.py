"""An option is a field of a frozen dataclass that says everything about itself. `same_bits` and
`changes_bits` declare one, so that every option says which it is. The keywords of `moejax.LLM`, the
flags of the command line, the keys of `--config FILE.yaml` and the help texts are made from these
fields."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, dataclass_transform

from moejax.errors import UserError, user_errors

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
Given = TypeVar("Given", contravariant=True)
Held = TypeVar("Held", covariant=True)


class Read(Generic[Given, Held]):
    """The annotation of a field whose option is given as one type and held as another, for type
    checkers: mypy does not know the converters of dataclass_transform."""

    if TYPE_CHECKING:

        def __get__(self, instance: object, owner: type | None = None) -> Held: ...
        def __set__(self, instance: object, value: Given) -> None: ...


@dataclasses.dataclass(frozen=True)
class Description:
    """The description of a flag of the command line, without its name."""

    help: str
    metavar: str | None = None
    """Placeholder of the value in help; None: N for a whole number."""
    type: Callable[[str], Any] | None = None
    """Converts the flag's text; None: the type of the field's annotation (int, float, bool), else
    str."""
    choices: tuple[str, ...] | None = None
    default: Any = None


@dataclasses.dataclass(frozen=True)
class Option(Description):
    """A field of a group of options."""

    convert: Callable[[Any], Any] | None = None
    """Converts a given value to the field's value; None: takes it unchanged."""
    changes_bits: bool = False
    """Whether another value may change bits of outputs, everything else being equal."""
    common: bool = False
    """Whether --help shows the option; otherwise only --help-all does."""
    settings: str = ""
    """Help for the option's KEY=VALUE settings, which --help leaves out."""
    in_file: bool = True
    """Whether `--config FILE` may have the option."""
    flag: bool = True
    """Whether the command line has the option too."""

    def read(self, name: str, value: Any) -> Any:
        """Converts a value to the field's value. Raises UserError for a value that cannot work."""
        if self.convert is not None:
            with user_errors():
                return self.convert(value)
        if value is None:
            return None
        if self.type is int:
            try:
                operator.index(value)
            except TypeError:
                raise UserError(f"{name} must be a whole number, got {value!r}") from None
            if value < 1 and name != "seed":
                raise UserError(f"{name} must be at least 1, got {value}")
        elif self.type is float and not isinstance(value, int | float):
            raise UserError(f"{name} must be a number, got {value!r}")
        elif self.type is bool and not isinstance(value, bool):
            raise UserError(f"{name} must be true or false, got {value!r}")
        return value


def same_bits(
    help: str,
    *,
    default: Any = dataclasses.MISSING,
    convert: Callable[[Any], Any] | None = None,
    kw_only: bool = True,
    **said: Any,
) -> Any:
    """Declares a field whose value changes no bit of an output, everything else being equal. A
    field without a default must be given.

    - `said`: further fields of Option.
    """
    if convert is not None:
        said = {"type": str, **said}
    if "settings" in said:
        said = {"metavar": "NAME[,KEY=VALUE…]", **said}
    flag = said.pop("flag", True) and said.get("in_file", True)
    found = Option(help, convert=convert, flag=flag, **said)
    return dataclasses.field(default=default, kw_only=kw_only, metadata={"option": found})


def changes_bits(help: str, **said: Any) -> Any:
    """Declares a field whose value may change bits of outputs.

    - `said`: further fields of Option.
    """
    return same_bits(help, changes_bits=True, **said)


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(same_bits, changes_bits)
)
def group(cls: type[T]) -> type[T]:
    """Makes a class of options a frozen dataclass whose fields hold what `Option.read` returns.
    Type checkers take a keyword's type from the field's annotation, see Read."""

    def read_all(self: T) -> None:
        for name, one in options_of(cls).items():
            object.__setattr__(self, name, one.read(name, getattr(self, name)))

    cls.__post_init__ = read_all  # type: ignore[attr-defined]
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


@functools.cache
def options_of(cls: type) -> dict[str, Option]:
    """Returns the Option of each field that is an option, by name."""
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(cls)
    return of_fields(cls, {f.name: f.metadata["option"] for f in fields if "option" in f.metadata})


D = TypeVar("D", bound=Description)


def of_fields(cls: type, described: Mapping[str, D]) -> dict[str, D]:
    """Returns the descriptions of a dataclass's fields. A description without a type gets the
    field's type."""
    kinds: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": bool}
    names = {field.name: str(field.type).partition(" ")[0] for field in dataclasses.fields(cls)}
    return {
        name: dataclasses.replace(one, type=one.type or kinds.get(names[name], str))
        for name, one in described.items()
    }


def optional(read: Callable[[T], R]) -> Callable[[T | None], R | None]:
    """Returns a `read` that passes None through, for options that may be None."""
    return lambda value: None if value is None else read(value)


def with_keywords_of(
    keywords: Callable[P, object], make: Callable[..., T]
) -> Callable[[Callable[[Any, T], None]], Callable[Concatenate[Any, P], None]]:
    """Decorates an `__init__(self, config)`: callers write the keywords of `keywords`, and `make`
    turns them into the config. Type checkers and inspect.signature see the keywords."""

    def decorate(function: Callable[[Any, T], None]) -> Callable[Concatenate[Any, P], None]:
        @functools.wraps(function)
        def wrapper(self: Any, *args: P.args, **given: P.kwargs) -> None:
            function(self, make(*args, **given))

        # Without annotations: those of the fields are of what was read, not of what may be given.
        empty, known = inspect.Parameter.empty, inspect.signature(keywords).parameters.values()
        self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [self, *(each.replace(annotation=empty) for each in known)]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return wrapper

    return decorate
