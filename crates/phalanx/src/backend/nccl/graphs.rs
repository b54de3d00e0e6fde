//! CUDA graphs with operations of a communicator.
//!
//! NCCL's abort waits until they are destroyed, and the thread that owns a graph often waits for the abort.
//! So the communicator owns the graphs and destroys them first.

use super::communicator::Communicator;
use crate::buffer::stream::GpuStream;
use crate::os::sync::lock;
use crate::types::error::{Error, Result};
use cudarc::driver::CudaGraph;
use std::sync::{Arc, Mutex, Weak};

/// A graph, until its communicator fails, and the stream on which it is launched.
pub(crate) struct HeldGraph(Mutex<Option<CudaGraph>>, GpuStream);

// SAFETY: the driver's handles may be used by any thread, one at a time, which the lock sees to.
unsafe impl Send for HeldGraph {}
// SAFETY: as above.
unsafe impl Sync for HeldGraph {}

/// The graphs of a communicator that are alive.
#[derive(Default)]
pub(crate) struct Graphs(Mutex<Vec<Weak<HeldGraph>>>);

impl Communicator {
    /// Takes a graph of its operations.
    pub fn hold(&self, graph: CudaGraph, stream: GpuStream) -> Arc<HeldGraph> {
        let held = Arc::new(HeldGraph(Mutex::new(Some(graph)), stream));
        let mut graphs = lock(&self.graphs.0);
        graphs.retain(|graph| graph.strong_count() > 0);
        graphs.push(Arc::downgrade(&held));
        held
    }

    /// Launches a graph, under the device's library lock.
    pub fn launch(&self, graph: &HeldGraph) -> Result<()> {
        self.make_room()?;
        let _current = self.device.enter();
        let launched = {
            let _locked = self.lock_library()?;
            self.count_ahead(graph.1.raw());
            self.come_after_last(graph.1.raw())?;
            lock(&graph.0).as_ref().map(CudaGraph::launch)
        };
        // The communicator has failed, and its abort needs the library lock.
        launched.ok_or_else(|| self.failure())?.map_err(Error::from)
    }

    /// Destroys all graphs, beside what this thread does next: a launch may hold one until the GPU goes on.
    /// What a graph still does is freed by the driver behind it.
    pub(crate) fn destroy_graphs(&self) {
        let graphs = std::mem::take(&mut *lock(&self.graphs.0));
        let graphs: Vec<_> = graphs.iter().filter_map(Weak::upgrade).collect();
        if graphs.is_empty() {
            return;
        }
        let device = self.device;
        let destroy = move || {
            let _current = device.enter();
            graphs.iter().for_each(|graph| drop(lock(&graph.0).take()));
        };
        // If no thread starts, the graphs' owners destroy them.
        let _ = std::thread::Builder::new().name("phalanx-graphs".into()).spawn(destroy);
    }
}
