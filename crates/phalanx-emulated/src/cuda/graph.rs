//! Graphs: captured work, as nodes with the nodes that they come after.

use super::error::{INVALID_VALUE, NOT_SUPPORTED};
use super::user_object::{self, Kept};
use super::work::Work;
use crate::base::call::{Code, exported};
use crate::base::handles::{self, Handle, Handles};
use crate::base::lock::lock;
use crate::base::pointers::Out;
use std::ffi::c_uint;
use std::sync::{Arc, Mutex};

/// A graph.
pub struct Graph {
    pub handle: Handle,
    nodes: Mutex<Vec<Node>>,
    kept: Mutex<Kept>,
}

/// A node of a graph.
#[derive(Clone)]
pub struct Node {
    pub work: Arc<dyn Work>,
    /// The nodes that it comes after, by their indices.
    pub after: Vec<usize>,
}

static GRAPHS: Handles<Graph> = Handles::new("graph");

impl Graph {
    /// An empty graph.
    pub fn new() -> Arc<Graph> {
        let handle = handles::fresh();
        let graph = Arc::new(Graph { handle, nodes: Mutex::default(), kept: Mutex::default() });
        GRAPHS.insert(handle, Arc::clone(&graph));
        graph
    }

    /// The nodes, and the user objects that the graph keeps alive.
    pub fn contents(&self) -> (Vec<Node>, Kept) {
        (lock(&self.nodes).clone(), lock(&self.kept).clone())
    }

    /// Adds a node and returns its index.
    pub fn add(&self, work: Arc<dyn Work>, after: Vec<usize>) -> usize {
        let mut nodes = lock(&self.nodes);
        nodes.push(Node { work, after });
        nodes.len() - 1
    }

    /// Whether each node of `early` is among `late` or comes before one of them.
    pub fn follows(&self, late: &[usize], early: &[usize]) -> bool {
        let nodes = lock(&self.nodes);
        let mut before = vec![false; nodes.len()];
        let mut open = late.to_vec();
        while let Some(node) = open.pop() {
            if !std::mem::replace(&mut before[node], true) {
                open.extend(&nodes[node].after);
            }
        }
        early.iter().all(|node| before[*node])
    }
}

/// The graph of a handle.
pub fn find(function: &str, handle: Handle) -> Arc<Graph> {
    GRAPHS.get(function, handle)
}

/// Drops the graph of a capture that failed.
pub fn discard(graph: &Graph) {
    if GRAPHS.find(graph.handle).is_some() {
        GRAPHS.end("cuStreamEndCapture", graph.handle, "the failure of its capture");
    }
}

exported! {
    fn cuGraphCreate(graph: Out<Handle>, flags: c_uint) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        graph.set(Graph::new().handle);
        Ok(())
    }

    fn cuGraphDestroy(graph: Handle) {
        GRAPHS.end(FUNCTION, graph, FUNCTION);
        Ok(())
    }

    fn cuGraphGetNodes(graph: Handle, nodes: Out<Handle>, number: Out<usize>) {
        if !nodes.is_null() {
            return Err(NOT_SUPPORTED);
        }
        number.set(lock(&GRAPHS.get(FUNCTION, graph).nodes).len());
        Ok(())
    }

    fn cuGraphRetainUserObject(graph: Handle, object: Handle, count: c_uint, flags: c_uint) {
        let graph = GRAPHS.get(FUNCTION, graph);
        let references = user_object::for_graph(FUNCTION, object, count, flags)?;
        lock(&graph.kept).extend(references);
        Ok(())
    }

    fn cuGraphReleaseUserObject(graph: Handle, object: Handle, count: c_uint) {
        release(&GRAPHS.get(FUNCTION, graph), object, count)
    }
}

fn release(graph: &Graph, object: Handle, count: c_uint) -> Result<(), Code> {
    let mut kept = lock(&graph.kept);
    for _ in 0..count {
        let place = kept.iter().position(|reference| reference.handle() == object).ok_or(INVALID_VALUE)?;
        kept.swap_remove(place);
    }
    Ok(())
}
