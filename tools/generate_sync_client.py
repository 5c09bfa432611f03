"""Generate `orchard.env.client.sync` from `orchard.env.client.aio`.

    python tools/generate_sync_client.py            write the modules
    python tools/generate_sync_client.py --check    exit with 1 if a written module is out of date

Every class `AsyncX` becomes a class `X` that holds an `AsyncX` and a portal: a coroutine method becomes a
method that runs the coroutine through the portal, a plain method or property is passed on, an asynchronous
generator becomes a generator. What comes back is wrapped where its type says so. Signatures, types and
docstrings are the asynchronous ones.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src/orchard/env/client/aio"
TARGET = ROOT / "src/orchard/env/client/sync"
MODULES = ("files", "commands", "terminals", "tunnels", "sessions", "sandbox", "images", "client")
#: The class that users construct; the others are made by its methods.
FRONT_DOOR = "AsyncSandboxClient"
HEADER = "# Generated from aio/{name}.py by tools/generate_sync_client.py; change that and run it.\n"
WORDS = (
    (r"\bAsync(?=[A-Z])", ""),
    (r"\basync (?=with|for|def)", ""),
    (r"\bawait ", ""),
    (r"\bThe asynchronous client\b", "The synchronous client"),
    (r"any number of tasks\b", "any number of threads"),
)
SPECIAL = {"__aenter__": "__enter__", "__aexit__": "__exit__"}


def plain(text: str) -> str:
    """Text with its asynchronous words replaced."""
    for pattern, replacement in WORDS:
        text = re.sub(pattern, replacement, text)
    return text


class Names(ast.NodeTransformer):
    """Renames what differs between the two worlds in signatures and module-level assignments."""

    def visit_Name(self, node: ast.Name) -> ast.Name:
        renamed = {"AsyncIterator": "Iterator"}.get(node.id, re.sub(r"^Async(?=[A-Z])", "", node.id))
        return ast.copy_location(ast.Name(renamed, node.ctx), node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """`AsyncIterable | Iterable` is one type here."""
        self.generic_visit(node)
        return node.left if ast.dump(node.left) == ast.dump(node.right) else node


def annotation(node: ast.expr | None) -> str:
    """A type annotation, in the synchronous world."""
    assert node is not None, "public methods are annotated"
    return ast.unparse(Names().visit(ast.parse(ast.unparse(node), mode="eval").body))


def docstring(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, indent: str) -> list[str]:
    """The docstring's source lines, as they stand, or none."""
    text = ast.get_docstring(node, clean=False)
    return [] if text is None else [f'{indent}"""{plain(text)}"""']


def forwarded(arguments: ast.arguments) -> str:
    """The call arguments that pass all parameters but self on."""
    positional = [each.arg for each in (*arguments.posonlyargs, *arguments.args)][1:]
    return ", ".join([*positional, *(f"{each.arg}={each.arg}" for each in arguments.kwonlyargs)])


def wrapped(type_text: str, value: str, wrappers: dict[str, str]) -> str:
    """`value`, of the asynchronous type `type_text`, as an expression of the synchronous one."""
    if type_text.startswith("Async"):
        return f"{type_text.removeprefix('Async')}(self._portal, {value})"
    if type_text in wrappers:
        element = wrappers[type_text]
        sync = element.removeprefix("Async")
        return f"[{sync}(self._portal, each) if isinstance(each, {element}) else each for each in {value}]"
    return value


class Module:
    """One module on its way from asynchronous to synchronous."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tree = ast.parse((SOURCE / f"{name}.py").read_text())
        self.classes = [node for node in self.tree.body if isinstance(node, ast.ClassDef)]
        #: Aliases of lists whose elements have to be wrapped: alias → asynchronous element class.
        self.wrappers: dict[str, str] = {}

    def render(self) -> str:
        """The synchronous module's source, not yet formatted."""
        # The order of definitions is kept; what is private to the implementation is left behind.
        body: list[str] = []
        for node in self.tree.body:
            if isinstance(node, ast.AnnAssign) and annotation(node.annotation) == "TypeAlias":
                body.append(self._alias(node))
            elif isinstance(node, ast.ClassDef):
                body.append(self._class(node))
        source = "\n\n".join(body)
        title = plain(ast.get_docstring(self.tree) or "")
        return (
            HEADER.format(name=self.name)
            + f'"""{title}"""\n\nfrom __future__ import annotations\n\n{self._imports(source)}\n\n{source}\n'
        )

    def _alias(self, node: ast.AnnAssign) -> str:
        assert isinstance(node.target, ast.Name) and node.value is not None
        text = ast.unparse(node.value)
        element = re.match(r"list\[(Async\w+)", text)
        if element:
            self.wrappers[node.target.id] = element[1]
        return f"{node.target.id}: TypeAlias = {annotation(node.value)}"

    def _imports(self, source: str) -> str:
        lines = ["from orchard.env.client.portal import Portal"]
        own = {node.name.removeprefix("Async") for node in self.classes}
        for node in self.tree.body:
            if not isinstance(node, ast.ImportFrom) or node.module in (None, "__future__"):
                continue
            for alias in node.names:
                name = {"AsyncIterator": "Iterator"}.get(alias.name, alias.name.removeprefix("Async"))
                if name in own or not re.search(rf"\b{name}\b", source):
                    continue
                module = str(node.module).replace(".aio.", ".sync.") if self._generated(node) else node.module
                lines.append(f"from {module} import {name}")
        for name in sorted(set(re.findall(r"\bAsync[A-Z]\w+", source))):
            lines.append(f"from orchard.env.client.aio.{self._home(name)} import {name}")
        for node in self.tree.body:
            if isinstance(node, ast.Import):
                lines += [f"import {a.name}" for a in node.names if re.search(rf"\b{a.name}\.", source)]
        return "\n".join(lines)

    @staticmethod
    def _generated(node: ast.ImportFrom) -> bool:
        return str(node.module).startswith("orchard.env.client.aio.")

    def _home(self, name: str) -> str:
        """The module that defines an asynchronous class."""
        for module in MODULES:
            if re.search(rf"^class {name}\b", (SOURCE / f"{module}.py").read_text(), re.MULTILINE):
                return module
        raise LookupError(name)

    def _class(self, node: ast.ClassDef) -> str:
        name = node.name.removeprefix("Async")
        lines = [f"class {name}:", *docstring(node, "    "), ""]
        if node.name == FRONT_DOOR:
            init = next(n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
            lines += [
                f"    def __init__({ast.unparse(init.args)}) -> None:",
                "        self._portal = Portal()",
                f"        self._async = {node.name}({forwarded(init.args)})",
                "        self._portal.at_close(self._async.close)",
            ]
        else:
            lines += [
                f"    def __init__(self, portal: Portal, wrapped: {node.name}) -> None:",
                "        self._portal = portal",
                "        self._async = wrapped",
            ]
        for each in node.body:
            lines += ["", *self._member(each)]
        return "\n".join(lines)

    def _member(self, node: ast.stmt) -> list[str]:
        if isinstance(node, ast.Assign):
            return ["    " + ast.unparse(node)]
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return []
        if node.name.startswith("_") and node.name not in (*SPECIAL, "__repr__"):
            return []
        head = f"    def {SPECIAL.get(node.name, node.name)}({self._parameters(node)})"
        head += f" -> {annotation(node.returns)}:"
        lines = [head, *docstring(node, "        "), *("        " + line for line in self._body(node))]
        if any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list):
            lines.insert(0, "    @property")
        return lines

    @staticmethod
    def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
        arguments = ast.parse(f"def f({ast.unparse(node.args)}): ...").body[0]
        assert isinstance(arguments, ast.FunctionDef)
        return ast.unparse(Names().visit(arguments.args))

    def _body(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
        if node.name == "__repr__":
            return ['return repr(self._async).replace("<Async", "<", 1)']
        if node.name == "__aenter__":
            # It awaits nothing: it runs on the caller's thread, where signal handlers may be set.
            assert not any(isinstance(each, ast.Await) for each in ast.walk(node))
            return [ast.unparse(each) for each in node.body]
        if any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list):
            return [f"return {self._wrap(node, f'self._async.{node.name}')}"]
        call = f"self._async.{node.name}({forwarded(node.args)})"
        if isinstance(node, ast.FunctionDef):
            return [f"return {self._wrap(node, call)}"]
        if any(isinstance(each, ast.Yield) for each in ast.walk(node)):
            assert isinstance(node.returns, ast.Subscript)
            item = wrapped(ast.unparse(node.returns.slice), "each", self.wrappers)
            if item == "each":
                return [f"yield from self._portal.iterate({call})"]
            return [f"for each in self._portal.iterate({call}):", f"    yield {item}"]
        call = f"self._portal.call({call})"
        if node.name in ("close", "__aexit__") and self.name == "client":
            return [
                "if self._portal.closed:",
                "    return",
                "try:",
                f"    {call}",
                "finally:",
                "    self._portal.close()",
            ]
        if annotation(node.returns) == "None":
            return [call]
        return [f"return {self._wrap(node, call)}"]

    def _wrap(self, node: ast.FunctionDef | ast.AsyncFunctionDef, value: str) -> str:
        assert node.returns is not None
        return wrapped(ast.unparse(node.returns), value, self.wrappers)


def formatted(source: str, name: str) -> str:
    """The source as ruff formats it, with sorted imports."""
    own = 'lint.isort.known-first-party = ["orchard"]'
    lint = ["check", "--select", "I,F401", "--fix", "--quiet", "--config", own]
    for command in (lint, ["format", "--quiet"]):
        source = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(TARGET / name), "-"],
            input=source,
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        ).stdout
    return source


def package() -> str:
    """The package's `__init__`."""
    exported: list[tuple[str, str]] = []
    for name in MODULES:
        exported += [(name, node.name.removeprefix("Async")) for node in Module(name).classes]
    imports = "\n".join(f"from orchard.env.client.sync.{module} import {name}" for module, name in exported)
    names = ", ".join(sorted(f'"{name}"' for _, name in exported))
    title = '"""The synchronous client, generated from the asynchronous one."""'
    return f"{HEADER.format(name='__init__')}{title}\n\n{imports}\n\n__all__ = [{names}]\n"


def generate() -> dict[Path, str]:
    """Path → source of every generated module."""
    sources = {f"{name}.py": Module(name).render() for name in MODULES}
    sources["__init__.py"] = package()
    return {TARGET / name: formatted(source, name) for name, source in sources.items()}


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = [path for path, source in generate().items() if not path.exists() or path.read_text() != source]
    if check:
        for path in stale:
            print(f"out of date: {path.relative_to(ROOT)}; run: python tools/generate_sync_client.py")
        return 1 if stale else 0
    TARGET.mkdir(exist_ok=True)
    for path, source in generate().items():
        path.write_text(source)
    return 0


if __name__ == "__main__":
    sys.exit(main())
