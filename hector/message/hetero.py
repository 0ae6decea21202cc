"""`hector.message.HeteroGraph`: nodes and edges of several types, with features."""

from hector.message import rebuild
from hector.message.graph import Graph
from hector.message.typed import TypedGraph


class HeteroGraph(TypedGraph):
    """Hold typed nodes and typed edges, with features by type.

    Functions with names of DGL do what DGL's do. A type of edges is named by (source,
    relation, destination), or by its relation where no other has it; where there is one
    type only, it need not be named. `graph[etype]` is the `Relation` of one type, which
    shares the features.
    """

    to = rebuild.to
    reverse = rebuild.reverse
    subgraph = rebuild.subgraph
    edge_subgraph = rebuild.edge_subgraph
    edge_type_subgraph = rebuild.edge_type_subgraph
    node_type_subgraph = rebuild.node_type_subgraph
    add_edges = rebuild.add_edges
    remove_edges = rebuild.remove_edges
    add_nodes = rebuild.add_nodes
    remove_nodes = rebuild.remove_nodes
    add_self_loop = rebuild.add_self_loop
    remove_self_loop = rebuild.remove_self_loop

    def __repr__(self) -> str:
        nodes = {n: f.num_rows for n, f in self._frames[0].items()}
        edges = {k: r.num_edges() for k, r in self._relations.items()}
        if not self.is_block:
            return f"HeteroGraph(num_nodes={nodes}, num_edges={edges})"
        ends = {n: f.num_rows for n, f in self._frames[1].items()}
        return (
            f"HeteroGraph.block(num_src_nodes={nodes}, num_dst_nodes={ends}, "
            f"num_edges={edges})"
        )


def as_hetero(graph: Graph | HeteroGraph) -> HeteroGraph:
    """Return a `Graph` as a typed graph of the types that DGL gives it, "_N" and
    "_E"; features are shared."""
    if isinstance(graph, HeteroGraph):
        return graph
    made = HeteroGraph.__new__(HeteroGraph)
    frames = {"_N": graph.ndata}
    kind = ("_N", "_E", "_N")
    made._set(frames, frames, {kind: graph.edges()}, graph.programs)
    made[kind].set_frames(*graph.frames())
    return made
