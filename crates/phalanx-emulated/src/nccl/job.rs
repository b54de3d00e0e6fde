//! Jobs: work on a communicator that takes long, such as its start, a split or its end.

use super::communicator::Communicator;
use super::exclusive::Exclusive;
use super::result::*;
use super::version::{FINALIZE_WAITS_FOR_ALL, is_since};
use crate::base::call::{Answer, Code};
use crate::base::random;
use crate::base::settings::{When, failure};
use std::sync::Arc;

/// A job.
pub struct Job {
    pub function: &'static str,
    pub communicator: Arc<Communicator>,
    pub body: Box<dyn FnOnce() -> Code + Send>,
}

impl Job {
    /// Whether other calls on the device are allowed while the job waits for other ranks.
    fn allows_other_calls(&self) -> bool {
        self.function == "ncclCommFinalize" && is_since(FINALIZE_WAITS_FOR_ALL)
    }
}

/// Runs jobs, all at the same time: in the background, unless their communicators are blocking.
pub fn run(jobs: Vec<Job>) -> Answer {
    let blocking = jobs.first().is_none_or(|job| job.communicator.config.blocking);
    if !blocking {
        for job in jobs {
            job.communicator.begin_job();
            std::thread::spawn(move || {
                random::shared().delay();
                let failure = late_failure(job.function, job.communicator.rank);
                let code = failure.unwrap_or_else(job.body);
                job.communicator.end_job(code);
            });
        }
        return Err(IN_PROGRESS);
    }
    let _exclusive: Vec<Exclusive> = jobs
        .iter()
        .filter(|job| !job.allows_other_calls())
        .map(|job| Exclusive::enter(job.function, job.communicator.device))
        .collect();
    let bodies: Vec<_> = jobs.into_iter().map(|job| job.body).collect();
    let codes: Vec<Code> = std::thread::scope(|scope| {
        let threads: Vec<_> = bodies.into_iter().map(|body| scope.spawn(body)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(INTERNAL_ERROR)).collect()
    });
    codes.into_iter().find(|code| *code != SUCCESS).map_or(Ok(()), Err)
}

/// The code with which background work of a call fails, if the settings say so.
pub fn late_failure(function: &str, rank: u32) -> Option<Code> {
    let code =
        failure(When::Late, function, None).or_else(|| failure(When::Late, function, Some(rank as i32)));
    code.map(|code| fail(code, format!("{function} was told to fail late")))
}
