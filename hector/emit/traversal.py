"""The traversal template: row operations and sums over a loop nest (Algorithm 3.2).

See [Note: phases] in `hector.emit.phases`.
"""

from dataclasses import dataclass, field
from enum import Enum

from hector.emit.gemm import Emitted
from hector.emit.phases import has_heads, is_sum, phases_of, separable_width
from hector.emit.source import ArgKind, Source, literal
from hector.emit.tiles import BINARY_TEXT, UNARY_TEXT, TileShapes, is_narrow
from hector.ir.kernels import SegmentMapping, Traversal, TraversalSchedule
from hector.ir.node import Node, Op, stored
from hector.ir.types import COMPOSE, TARGET, TYPE_DOMAINS, Domain, Index

ONLY_ROW = "0"
"""Where a value of one row is read; its partial sums have a row a tile."""
ITEM = "item"
"""A row that is found by the list of its group's."""


@dataclass(frozen=True)
class _Cursor:
    """A row at hand: whose, in which variable, known how deep in the loop nest."""

    domain: Domain
    var: str
    level: int
    """0: the group, 1: the row inside it."""


@dataclass(frozen=True)
class _Value:
    text: str
    level: int


@dataclass
class _Scope:
    """Lines and known variables of one level of the loop nest."""

    lines: list[str] = field(default_factory=list)
    values: dict[tuple[Node, str], _Value] = field(default_factory=dict)
    cursors: dict[tuple[str, Index], _Cursor] = field(default_factory=dict)


class SegmentGroups(Enum):
    """Which groups one launch takes; see `SegmentMapping.is_split`."""

    ALL = "all"
    HEAVY = "heavy"
    LIGHT = "light"


def emit_traversal(
    k: Traversal,
    name: str,
    schedule: TraversalSchedule,
    groups: SegmentGroups = SegmentGroups.ALL,
) -> Emitted:
    """The kernel text of a traversal instance, for one launch over `groups`."""
    return _Traversal(k, name, schedule, groups).build()


class _Traversal:
    def __init__(
        self,
        k: Traversal,
        name: str,
        schedule: TraversalSchedule,
        groups: SegmentGroups,
    ) -> None:
        self.k, self.schedule, self.groups = k, schedule, groups
        self.src = Source(name)
        self.inside = set(k.members)
        self.group = k.loop.group
        target = TARGET[k.loop.domain, k.loop.group] if k.loop.group else None
        self.group_domain = target or k.loop.domain
        self.into_types = self.group_domain in TYPE_DOMAINS
        walked = self.group is not None and not self.into_types
        self.lanes = walked and schedule.mapping is SegmentMapping.LANE
        width, self.parts = separable_width(k), 1
        columns = schedule.block_columns
        if walked and width is not None and columns < width:
            self.parts = -(-width // columns)
            self.tiles = TileShapes(heads=False, columns=columns)
        else:
            self.tiles = TileShapes(heads=has_heads(k.members))
        self.registers: dict[Node, str] = {}
        self.kept: set[Node] = set()
        """Rows stored in an earlier phase: see [Note: phases]."""
        self.reads_kept = False
        self.scopes = [_Scope(), _Scope()]

    # The nest.

    def build(self) -> Emitted:
        grid = self._outer_header()
        if self.group is None:
            for node in self.k.members:
                self._settle(node, self.segment)
            self._flush(0)
        else:
            for phase, nodes in enumerate(phases_of(self.k)):
                self._phase(phase, nodes)
        self.src.lines[:0] = ["    " + v for v in sorted(self.tiles.vectors)]
        return Emitted(
            source=self.src,
            doc=f"{self.k.loop}",
            grid=grid,
            num_warps=self.schedule.num_warps,
            num_stages=self.schedule.num_stages,
        )

    def _outer_header(self) -> tuple[object, ...]:
        src, loop, block = self.src, self.k.loop, self.schedule.block
        grid: tuple[object, ...]
        if self.into_types:
            return self._tile_header()
        if self.group is None or self.lanes:
            count = src.arg(ArgKind.COUNT, self.group_domain, "count")
            seg = f"tl.program_id(0) * {block} + tl.arange(0, {block})"
            if self.groups is SegmentGroups.LIGHT:
                seg += f" + {src.arg(ArgKind.COUNT, self._heavy, 'heavy')}"
            src.emit(f"seg = {seg}")
            src.emit(f"seg_ok = seg < {count}")
            self.seg_mask: str | None = "seg_ok"
            grid = (("rows", self.group_domain, block), self.parts, 1)
            if self.groups is SegmentGroups.LIGHT:
                light = ("light", self.group_domain, block, *self._heavy)
                grid = (light, self.parts, 1)
        else:
            first = "tl.program_id(0)"
            self.seg_mask = None
            grid = (("rows", self.group_domain, 1), self.parts, 1)
            if self.groups is SegmentGroups.HEAVY:
                grid = (("heavy", *self._heavy), self.parts, 1)
            if self.groups is SegmentGroups.LIGHT:
                first += f" + {src.arg(ArgKind.COUNT, self._heavy, 'heavy')}"
                light = ("light", self.group_domain, 1, *self._heavy)
                grid = (light, self.parts, 1)
            src.emit(f"first = {first}")
        if self.group is not None:
            self._group_header(loop.domain)
        self.segment = _Cursor(self.group_domain, "seg", 0)
        return grid

    def _group_header(self, domain: Domain) -> None:
        src, key = self.src, (domain, self.group)
        var = "seg" if self.lanes else "first"
        masked = ", mask=seg_ok, other=0" if self.lanes else ""
        if self.schedule.heavy_first:
            remap = src.arg(ArgKind.REMAP, key, "remap")
            src.emit(f"{var} = tl.load({remap} + {var}{masked})")
        ptr = src.arg(ArgKind.SEGMENT_PTR, key, "ptr")
        src.emit(f"lo = tl.load({ptr} + {var}{masked})")
        src.emit(f"hi = tl.load({ptr} + {var} + 1{masked})")
        if not self.lanes:
            src.emit("seg = first + tl.arange(0, 1)")

    def _tile_header(self) -> tuple[object, ...]:
        src = self.src
        key = (self.k.loop.domain, self.group, self.schedule.chunk_rows)
        self.tile_key = key
        kind = src.arg(ArgKind.TILE_TYPE, key, "tile_type")
        lo = src.arg(ArgKind.TILE_START, key, "tile_start")
        hi = src.arg(ArgKind.TILE_END, key, "tile_end")
        src.emit("tile = tl.program_id(0)")
        src.emit(f"lo = tl.load({lo} + tile)")
        src.emit(f"hi = tl.load({hi} + tile)")
        src.emit(f"seg = tl.load({kind} + tile) + tl.arange(0, 1)")
        self.seg_mask = None
        self.segment = _Cursor(self.group_domain, "seg", 0)
        return (("tiles", *key), 1, 1)

    def _phase(self, phase: int, nodes: list[Node]) -> None:
        """One run over the rows of the group; see [Note: phases]."""
        sums = [n for n in nodes if is_sum(self.k, n)]
        rows = [n for n in nodes if n.domain is self.k.loop.domain]
        groups = [n for n in nodes if n not in sums and n not in rows]
        if sums or rows:
            self._loop(sums, rows, phase)
        for node in groups:
            self._settle(node, self.segment)
        self._flush(0)

    def _loop(self, sums: list[Node], rows: list[Node], phase: int) -> None:
        block = 1 if self.lanes else self.schedule.block
        self.scopes[1] = _Scope()
        self.reads_kept = False
        element = self._element(block)
        for node in rows:
            self._settle(node, element)
        accumulators = {n: f"acc{phase}_{i}" for i, n in enumerate(sums)}
        for node, acc in accumulators.items():
            self._accumulate(node, acc, element)
        lanes = self.schedule.block
        for node, acc in accumulators.items():
            start = "0.0" if node.attr("reduce") == "sum" else 'float("-inf")'
            shape = ", ".join(map(str, self.tiles.shape(node.shape, lanes)))
            self._line(0, f"{acc} = tl.full([{shape}], {start}, tl.float32)")
        self._flush(0)
        if self.reads_kept:
            self.src.emit("tl.debug_barrier()")
        header = f"for at in range(lo, hi, {block}):"
        if self.lanes:
            self.src.emit("longest = tl.max(hi - lo, axis=0)")
            header = "for at in range(0, longest):"
        with self.src.block(header):
            self._flush(1)
        for node, acc in accumulators.items():
            self._finish(node, acc)
        self.kept.update(n for n in rows if n in self.k.stores and is_narrow(n))

    def _element(self, block: int) -> _Cursor:
        rows = "lo + at" if self.lanes else f"at + tl.arange(0, {block})"
        self._line(1, f"pos = {rows}")
        self._line(1, "ok = pos < hi")
        key = (self.k.loop.domain, self.group)
        in_order = self.schedule.in_order or key == (Domain.EDGE, Index.DST_PAIR)
        if self.into_types or in_order:
            # These items lie in the order of their groups.
            return _Cursor(self.k.loop.domain, "pos", 1)
        items = self.src.arg(ArgKind.SEGMENT_ITEMS, key, "items")
        # Triton leaves it out where nothing of the item's own is read.
        self._line(1, f"{ITEM} = tl.load({items} + pos, mask=ok, other=0)")
        return _Cursor(self.k.loop.domain, ITEM, 1)

    def _accumulate(self, node: Node, acc: str, element: _Cursor) -> None:
        value = self.value(node.inputs[0], element)
        ok = self.tiles.spread("ok")
        if node.attr("reduce") == "sum":
            self._line(1, f"{acc} += tl.where({ok}, {value.text}, 0.0)")
        else:
            shown = f'tl.where({ok}, {value.text}, float("-inf"))'
            self._line(1, f"{acc} = tl.maximum({acc}, {shown})")

    def _finish(self, node: Node, acc: str) -> None:
        total = node.attr("reduce") == "sum"
        text = acc
        if not self.lanes:
            how = "sum" if total else "max"
            text = f"tl.{how}({acc}, axis=0, keep_dims=True)"
        name = self.src.let("group", text)
        if not total:
            name = self.src.let(
                "group", f'tl.where({name} > float("-inf"), {name}, 0.0)'
            )
        self.registers[node] = name
        if node in self.k.stores:
            self._store_at(node, _Value(name, 0), self.segment, node.shape, 0)
            self._flush(0)

    # Statements.

    def _settle(self, node: Node, cursor: _Cursor) -> None:
        """Computes a member and stores it if somebody reads it."""
        if node.op is Op.CONCAT:
            if node in self.k.stores:
                self._store_halves(node, node, cursor, 0)
            return
        value = self.value(node, cursor)
        if cursor.level == 0 and self.group is not None:
            self.registers[node] = value.text
        if node in self.k.stores:
            self._store_at(node, value, cursor, node.shape, 0)

    def value(self, node: Node, cursor: _Cursor) -> _Value:
        """The tile of `node` at the row of `cursor`, emitted where it belongs."""
        if node in self.registers and cursor.var == "seg":
            return _Value(self.registers[node], 0)
        for scope in self.scopes[: cursor.level + 1]:
            if (node, cursor.var) in scope.values:
                return scope.values[node, cursor.var]
        found = self._compute(node, cursor)
        self.scopes[found.level].values[node, cursor.var] = found
        return found

    def _compute(self, node: Node, cursor: _Cursor) -> _Value:
        if node in self.kept and cursor.level == 1:
            self.reads_kept = True
            return self._load(node, cursor, node.shape, 0)
        if node.op is Op.CONST:
            return _Value(literal(node.number("value")), 0)
        if node.op is Op.READ and node not in self.k.loads:
            return self.value(node.inputs[0], self._follow(cursor, node.index))
        if self._in_memory(node):
            return self._load(node, cursor, node.shape, 0)
        if node.op is Op.EXPAND:
            return self.value(node.inputs[0], cursor)
        if node.op is Op.RESHAPE:
            return self._load(stored(node), cursor, node.shape, 0)
        if node.op is Op.SLICE:
            start = node.integer("start")
            return self._load(stored(node.inputs[0]), cursor, node.shape, start)
        parts = [self.value(i, cursor) for i in node.inputs]
        return self._let(node, parts)

    def _in_memory(self, node: Node) -> bool:
        if node.op in (Op.INPUT, Op.GRAPH):
            return True
        return node in self.k.loads and node not in self.inside

    def _let(self, node: Node, parts: list[_Value]) -> _Value:
        level = max(p.level for p in parts)
        texts = [p.text for p in parts]
        if node.op in UNARY_TEXT:
            text = UNARY_TEXT[node.op].format(*texts)
        elif node.op in BINARY_TEXT:
            text = BINARY_TEXT[node.op].format(*texts)
        else:
            text = self.tiles.within_row(node, texts[0])
        return self._variable(text, level)

    def _variable(self, text: str, level: int, stem: str = "v") -> _Value:
        name = self.src.fresh(stem)
        self._line(level, f"{name} = {text}")
        return _Value(name, level)

    # Rows.

    def _follow(self, cursor: _Cursor, index: Index) -> _Cursor:
        if index is Index.ALL:
            return _Cursor(Domain.GLOBAL, ONLY_ROW, 0)
        if cursor.level == 1 and cursor.domain is self.k.loop.domain:
            if index is self.group:
                return self.segment
            for onward in Index:
                both = COMPOSE.get((cursor.domain, self.group or index, onward))
                if both is index:
                    return self._follow(self.segment, onward)
        key = (cursor.var, index)
        scope = self.scopes[cursor.level]
        if key not in scope.cursors:
            mask = self._mask(cursor.level)
            extra = f", mask={mask}, other=0" if mask else ""
            place = cursor.var
            if place == ITEM and self.schedule.ends_in_order:
                what: object = (cursor.domain, self.group, index)
                table = self.src.arg(ArgKind.SEGMENT_INDEX, what, "ends")
                place = "pos"
            else:
                table = self.src.arg(ArgKind.INDEX, (cursor.domain, index), "index")
            text = f"tl.load({table} + {place}{extra})"
            found = self._variable(text, cursor.level, "at")
            target = TARGET[cursor.domain, index]
            scope.cursors[key] = _Cursor(target, found.text, cursor.level)
        return scope.cursors[key]

    def _load(
        self, node: Node, cursor: _Cursor, shape: tuple[int, ...], start: int
    ) -> _Value:
        ptr = self.src.arg(ArgKind.VALUE, node, "x")
        place = self._place(node, cursor, shape, start)
        mask = self._load_mask(cursor, shape)
        extra = f", mask={mask}, other=0.0" if mask else ""
        text = f"tl.load({ptr} + {place}{extra}).to(tl.float32)"
        level = 0 if cursor.domain is Domain.GLOBAL else cursor.level
        return self._variable(text, level)

    def _store_halves(
        self, whole: Node, part: Node, cursor: _Cursor, start: int
    ) -> None:
        """A concat is joined in memory: it has no value in registers."""
        if part.op is not Op.CONCAT or part in self.k.loads:
            value = self.value(part, cursor)
            self._store_at(whole, value, cursor, part.shape, start)
            return
        for half in part.inputs:
            self._store_halves(whole, half, cursor, start)
            start += half.shape[1]

    def _store_at(
        self,
        node: Node,
        value: _Value,
        cursor: _Cursor,
        shape: tuple[int, ...],
        start: int,
    ) -> None:
        if self.into_types and cursor.level == 0:
            ptr = self.src.arg(ArgKind.PARTIAL, node, "partial")
            cursor = _Cursor(cursor.domain, "(tile + tl.arange(0, 1))", 0)
        else:
            ptr = self.src.arg(ArgKind.VALUE, node, "out")
        place = self._place(node, cursor, shape, start)
        mask = self._load_mask(cursor, shape)
        extra = f", mask={mask}" if mask else ""
        count = self.schedule.block if cursor.level or self._many else 1
        full = ", ".join(map(str, self.tiles.shape(shape, count)))
        spread = f"tl.broadcast_to({value.text}, [{full}])"
        if value.text[0].isdigit() or value.text[0] == "-":
            spread = f"tl.full([{full}], {value.text}, tl.float32)"
        self._line(cursor.level, f"tl.store({ptr} + {place}, {spread}{extra})")

    def _place(
        self, node: Node, cursor: _Cursor, shape: tuple[int, ...], start: int
    ) -> str:
        row = None if cursor.var == ONLY_ROW else cursor.var
        return self.tiles.place(row, node.type.width, shape, start)

    def _load_mask(self, cursor: _Cursor, shape: tuple[int, ...]) -> str:
        rows = self._mask(cursor.level)
        if cursor.domain is Domain.GLOBAL:
            rows = None
        return self.tiles.mask(rows, shape)

    def _mask(self, level: int) -> str | None:
        return "ok" if level else self.seg_mask

    @property
    def _heavy(self) -> tuple[object, ...]:
        """What the number of heavy groups is asked for by."""
        return (self.k.loop.domain, self.group, self.schedule.heavy_rows)

    @property
    def _many(self) -> bool:
        """Whether a program takes several groups (or ungrouped rows)."""
        return self.group is None or self.lanes

    def _line(self, level: int, text: str) -> None:
        self.scopes[level].lines.append(text)

    def _flush(self, level: int) -> None:
        for line in self.scopes[level].lines:
            self.src.emit(line)
        self.scopes[level].lines.clear()
