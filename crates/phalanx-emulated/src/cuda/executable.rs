//! Executable graphs, and their launches.

use super::error::INVALID_VALUE;
use super::graph::{self, Node};
use super::queue::{Mark, Stream};
use super::stream;
use super::user_object::Kept;
use super::work::{Job, Work};
use crate::base::call::{Answer, exported};
use crate::base::handles::{self, Handle, Handles};
use crate::base::lock::lock;
use crate::base::pointers::Out;
use crate::base::random::Random;
use std::sync::{Arc, Mutex};

/// A graph that can be launched.
pub struct Executable {
    nodes: Vec<Node>,
    random: Random,
    /// The end of its last launch: launches of one executable do not overlap.
    last: Mutex<Option<Mark>>,
    _kept: Kept,
}

static EXECUTABLES: Handles<Executable> = Handles::new("executable graph");

impl Work for Executable {
    fn bind(self: Arc<Self>) -> Job {
        // Nodes are bound in the order of capture, and performed in any order that the graph allows.
        let mut jobs: Vec<Option<Job>> =
            self.nodes.iter().map(|node| Some(Arc::clone(&node.work).bind())).collect();
        Box::new(move || {
            for index in self.order() {
                self.random.delay();
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
    /// An order of the nodes that the graph allows, chosen anew each time.
    fn order(&self) -> Vec<usize> {
        let count = self.nodes.len();
        let mut done = vec![false; count];
        let mut order = Vec::with_capacity(count);
        while order.len() < count {
            let mut ready: Vec<usize> = (0..count).filter(|n| !done[*n]).collect();
            let is_blocked = |n: &usize| {
                let node = &self.nodes[*n];
                let early = |m: usize| !done[m] && m < *n && self.nodes[m].work.keeps_order();
                node.after.iter().any(|m| !done[*m]) || (node.work.keeps_order() && (0..*n).any(early))
            };
            ready.retain(|n| !is_blocked(n));
            let next = ready[self.random.below(ready.len())];
            done[next] = true;
            order.push(next);
        }
        order
    }

    fn launch(self: &Arc<Executable>, stream: &Arc<Stream>) -> Answer {
        if stream.capture().is_some() {
            return stream.enqueue(Arc::<Executable>::clone(self));
        }
        let mut last = lock(&self.last);
        let job = Arc::<Executable>::clone(self).bind();
        *last = Some(stream.submit(last.take().into_iter().collect(), job));
        Ok(())
    }
}

fn instantiate(function: &str, to: Out<Handle>, graph: Handle, flags: u64) -> Answer {
    // Flags: free on launch, upload, launch from the device, node priorities.
    if flags & !15 != 0 || flags & 5 == 5 {
        return Err(INVALID_VALUE);
    }
    let (nodes, kept) = graph::find(function, graph).contents();
    let handle = handles::fresh();
    let executable = Executable { nodes, random: Random::new(handle), last: Mutex::default(), _kept: kept };
    EXECUTABLES.insert(handle, Arc::new(executable));
    to.set(handle);
    Ok(())
}

exported! {
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
}
