//! Graphs: work that was captured, to be done again and again.

use super::capture;
use super::error::INVALID_VALUE;
use super::queue::{Job, Mark, Stream, Work};
use super::stream;
use super::user_object::{self, Kept};
use crate::call::{Answer, Code};
use crate::handles::{self, Handle, Handles};
use crate::lock;
use crate::pointers::Out;
use crate::random::Random;
use std::ffi::c_uint;
use std::sync::{Arc, Mutex};

/// A graph.
pub struct Graph {
    pub handle: Handle,
    nodes: Mutex<Vec<Node>>,
    kept: Mutex<Kept>,
}

#[derive(Clone)]
struct Node {
    work: Arc<dyn Work>,
    after: Vec<usize>,
}

/// A graph that can be launched.
pub struct Executable {
    nodes: Vec<Node>,
    random: Random,
    /// It does not run beside itself.
    last: Mutex<Option<Mark>>,
    _kept: Kept,
}

static GRAPHS: Handles<Graph> = Handles::new("graph");
static EXECUTABLES: Handles<Executable> = Handles::new("executable graph");

impl Graph {
    /// An empty graph.
    pub fn new() -> Arc<Graph> {
        let handle = handles::fresh();
        let graph = Arc::new(Graph { handle, nodes: Mutex::default(), kept: Mutex::default() });
        GRAPHS.insert(handle, Arc::clone(&graph));
        graph
    }

    /// Adds a node and returns its index.
    pub fn add(&self, work: Arc<dyn Work>, after: Vec<usize>) -> usize {
        let mut nodes = lock(&self.nodes);
        nodes.push(Node { work, after });
        nodes.len() - 1
    }

    /// Whether all of `early` are among `late` or come before them.
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

/// Drops a graph that nobody has been given: its capture failed.
pub fn discard(graph: &Graph) {
    if GRAPHS.find(graph.handle).is_some() {
        GRAPHS.end("cuStreamEndCapture", graph.handle, "the failure of its capture");
    }
}

impl Work for Executable {
    fn bind(self: Arc<Self>) -> Job {
        // Each node is bound in the order in which it was captured; they are performed in any that the graph allows.
        let mut jobs: Vec<Option<Job>> =
            self.nodes.iter().map(|node| Some(Arc::clone(&node.work).bind())).collect();
        Box::new(move || {
            for index in self.order() {
                self.random.dawdle();
                if let Some(job) = jobs[index].take() {
                    job();
                }
            }
        })
    }

    fn keeps_order(&self) -> bool {
        self.nodes.iter().any(|node| node.work.keeps_order())
    }
}

impl Executable {
    /// An order of the nodes, another one each time.
    fn order(&self) -> Vec<usize> {
        let count = self.nodes.len();
        let mut done = vec![false; count];
        let mut order = Vec::with_capacity(count);
        while order.len() < count {
            let mut ready: Vec<usize> = (0..count).filter(|n| !done[*n]).collect();
            let held = |n: &usize| {
                let node = &self.nodes[*n];
                let early = |m: usize| !done[m] && m < *n && self.nodes[m].work.keeps_order();
                node.after.iter().any(|m| !done[*m]) || (node.work.keeps_order() && (0..*n).any(early))
            };
            ready.retain(|n| !held(n));
            let next = ready[self.random.below(ready.len())];
            done[next] = true;
            order.push(next);
        }
        order
    }

    fn launch(self: &Arc<Executable>, stream: &Arc<Stream>) -> Answer {
        if capture::of(stream).is_some() {
            return capture::enqueue(stream, Arc::<Executable>::clone(self));
        }
        let mut last = lock(&self.last);
        let job = Arc::<Executable>::clone(self).bind();
        *last = Some(stream.submit(last.take().into_iter().collect(), job));
        Ok(())
    }
}

fn instantiate(function: &str, to: Out<Handle>, graph: Handle, flags: u64) -> Answer {
    // Free on launch, upload, launch from the device, node priorities.
    if flags & !15 != 0 || flags & 5 == 5 {
        return Err(INVALID_VALUE);
    }
    let graph = GRAPHS.get(function, graph);
    let handle = handles::fresh();
    let executable = Executable {
        nodes: lock(&graph.nodes).clone(),
        random: Random::new(handle),
        last: Mutex::default(),
        _kept: lock(&graph.kept).clone(),
    };
    EXECUTABLES.insert(handle, Arc::new(executable));
    to.set(handle);
    Ok(())
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

    fn cuGraphInstantiateWithFlags(executable: Out<Handle>, graph: Handle, flags: u64) {
        instantiate(FUNCTION, executable, graph, flags)
    }

    fn cuGraphExecDestroy(executable: Handle) {
        EXECUTABLES.end(FUNCTION, executable, FUNCTION);
        Ok(())
    }

    fn cuGraphUpload(executable: Handle, stream: Handle) {
        EXECUTABLES.get(FUNCTION, executable);
        stream::find(FUNCTION, stream).map(drop)
    }

    fn cuGraphLaunch(executable: Handle, stream: Handle) {
        EXECUTABLES.get(FUNCTION, executable).launch(&stream::find(FUNCTION, stream)?)
    }

    fn cuGraphGetNodes(graph: Handle, nodes: Out<Handle>, number: Out<usize>) {
        if !nodes.is_null() {
            return Err(super::error::NOT_SUPPORTED);
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
