"""Read the parameters of a class from its source, without importing it."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from camshaft.recipe.modules import Definition, Source, find


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument: its annotation and default as source, and the module whose names they use."""

    name: str
    annotation: ast.expr | None
    default: str | None
    source: Source

    @property
    def is_required(self) -> bool:
        """Whether it must be given."""
        return self.default is None


@dataclass(slots=True)
class Signature:
    """The arguments of a constructor. ``is_open`` means that it may take others, which nobody can name."""

    path: str
    parameters: dict[str, Parameter] = field(default_factory=dict)
    is_open: bool = False
    bases: list[str] = field(default_factory=list)
    all_bases_known: bool = True
    doc: str = ""
    line: int = 0
    file: str = ""


def signature(definition: Definition, local: str | None) -> Signature:
    """Return the constructor's arguments, those of a base included where ``**kwargs`` passes them on."""
    node, source = definition.node, definition.source
    result = Signature(definition.path, doc=_summary(node), line=node.lineno, file=str(source.file))
    if isinstance(node, ast.FunctionDef):
        _read_arguments(result, node.args, source, skip=0)
        return result
    order = _linear(definition, local, result, 0)
    result.bases = [item.path for item in order]
    for item in order:
        if not isinstance(item.node, ast.ClassDef):
            continue
        if _is_dataclass(item.node):
            _read_fields(result, order[order.index(item) :])
            return result
        init = _constructor(item.node)
        if init is None:
            continue
        passes_on = _read_arguments(result, init.args, item.source, skip=1, is_inherited=item is not order[0])
        if not passes_on:
            return result
        if not _only_to_base(init):
            result.is_open = True
            return result
    result.is_open = not result.all_bases_known
    return result


def _linear(definition: Definition, local: str | None, result: Signature, depth: int) -> list[Definition]:
    """Return the class and its bases, left to right, depth first."""
    order = [definition]
    if depth > 12 or not isinstance(definition.node, ast.ClassDef):
        result.all_bases_known = False
        return order
    for base in definition.node.bases:
        expression = base.value if isinstance(base, ast.Subscript) else base
        path = qualified(expression, definition.source)
        if path in ("object", "Generic", "typing.Generic", "typing.Protocol", "abc.ABC"):
            continue
        found = find(path, local) if path and "." in path else None
        if not isinstance(found, Definition):
            result.all_bases_known = False
            continue
        order += [item for item in _linear(found, local, result, depth + 1) if item not in order]
    return order


def qualified(expression: ast.expr, source: Source) -> str:
    """Return the dotted path of a name as the module binds it, or nothing."""
    if isinstance(expression, ast.Attribute):
        head = qualified(expression.value, source)
        return f"{head}.{expression.attr}" if head else ""
    if not isinstance(expression, ast.Name):
        return ""
    bound = source.get(expression.id)
    if isinstance(bound, tuple):
        return ".".join(part for part in bound if part)
    if bound is not None:
        return f"{source.name}.{expression.id}"
    for star in source.stars:
        found = find(f"{star}.{expression.id}", source.local)
        if isinstance(found, Definition):
            return found.path
    return expression.id


def _read_arguments(
    result: Signature, arguments: ast.arguments, source: Source, *, skip: int, is_inherited: bool = False
) -> bool:
    """Add parameters; return whether a ``**kwargs`` passes others on to a base."""
    between = is_inherited and bool(result.parameters)
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    pairs = list(zip(positional, defaults, strict=True))[skip:]
    pairs += list(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    for argument, default in pairs:
        text = ast.unparse(default) if default is not None else None
        if between and text is None:
            # The class between may pass it itself.
            text = "..."
        result.parameters.setdefault(argument.arg, Parameter(argument.arg, argument.annotation, text, source))
    return arguments.kwarg is not None


def _constructor(node: ast.ClassDef) -> ast.FunctionDef | None:
    functions = {f.name: f for f in node.body if isinstance(f, ast.FunctionDef)}
    return functions.get("__init__") or functions.get("__new__")


def _only_to_base(init: ast.FunctionDef) -> bool:
    """Say whether ``**kwargs`` go to the constructor of a base and nowhere else."""
    name = init.args.kwarg.arg if init.args.kwarg is not None else ""
    uses = sum(isinstance(node, ast.Name) and node.id == name for node in ast.walk(init))
    passed = 0
    for node in ast.walk(init):
        is_base = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "__init__"
        if is_base and isinstance(node, ast.Call):
            passed += sum(k.arg is None and isinstance(k.value, ast.Name) and k.value.id == name for k in node.keywords)
    return uses == passed


def _is_dataclass(node: ast.ClassDef) -> bool:
    names = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return any(isinstance(d, ast.Name | ast.Attribute) and ast.unparse(d).endswith("dataclass") for d in names)


def _read_fields(result: Signature, order: list[Definition]) -> None:
    for item in reversed(order):
        for statement in item.node.body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            name = statement.target.id
            if "ClassVar" in ast.unparse(statement.annotation):
                continue
            default = ast.unparse(statement.value) if statement.value is not None else None
            if default is not None and default.startswith("field(") and "default" not in default:
                default = None
            if default is not None and "init=False" in default:
                continue
            result.parameters[name] = Parameter(name, statement.annotation, default, item.source)


def _summary(node: ast.ClassDef | ast.FunctionDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n")[0]
