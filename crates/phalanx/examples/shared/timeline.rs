//! What ran when on a GPU, by events in its streams.

use crate::gpu::Result;
use cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use cudarc::driver::{CudaEvent, CudaStream};

/// Characters of a printed line.
const WIDTH: usize = 96;

/// A piece of work, from one event to another.
struct Span {
    lane: &'static str,
    begin: CudaEvent,
    end: CudaEvent,
}

/// Pieces of work on some lanes.
pub struct Timeline {
    start: CudaEvent,
    spans: Vec<Span>,
}

/// An event that knows its time, behind the stream's work so far.
pub fn mark(stream: &CudaStream) -> Result<CudaEvent> {
    Ok(stream.record_event(Some(CU_EVENT_DEFAULT))?)
}

impl Timeline {
    /// Starts where the stream is now.
    pub fn start(stream: &CudaStream) -> Result<Timeline> {
        Ok(Timeline { start: mark(stream)?, spans: Vec::new() })
    }

    pub fn add(&mut self, lane: &'static str, begin: CudaEvent, end: CudaEvent) {
        self.spans.push(Span { lane, begin, end });
    }

    /// Beginnings and ends on a lane, in milliseconds since the start. The work has to be complete.
    pub fn times(&self, lane: &str) -> Result<Vec<(f32, f32)>> {
        let time = |event: &CudaEvent| self.start.elapsed_ms(event);
        let spans = self.spans.iter().filter(|span| span.lane == lane);
        spans.map(|span| Ok((time(&span.begin)?, time(&span.end)?))).collect()
    }

    /// How long both lanes were busy at once, in milliseconds.
    pub fn overlap(&self, first: &str, second: &str) -> Result<f32> {
        let (first, second) = (self.times(first)?, self.times(second)?);
        let pairs = first.iter().flat_map(|a| second.iter().map(move |b| a.1.min(b.1) - a.0.max(b.0)));
        Ok(pairs.filter(|both| *both > 0.0).sum())
    }

    /// One line for each lane: when it was busy.
    pub fn print(&self, lanes: &[&str]) -> Result<()> {
        let all = lanes.iter().map(|lane| self.times(lane)).collect::<Result<Vec<_>>>()?;
        let end = all.iter().flatten().map(|span| span.1).fold(0.0, f32::max);
        let at = |time: f32| (time / end * WIDTH as f32) as usize;
        for (lane, spans) in lanes.iter().zip(&all) {
            let mut line = vec![b'.'; WIDTH];
            for (number, (begin, end)) in spans.iter().enumerate() {
                let symbol = b'0' + (number % 10) as u8;
                line[at(*begin).min(WIDTH - 1)..(at(*end)).clamp(at(*begin) + 1, WIDTH)].fill(symbol);
            }
            let busy: f32 = spans.iter().map(|(begin, end)| end - begin).sum();
            println!("{lane:>13} |{}| {busy:.2} ms", String::from_utf8_lossy(&line));
        }
        println!("{:>13} 0{:>WIDTH$.2} ms", "", end);
        Ok(())
    }
}
