//! What a rank tells `phalanx launch`: that it has joined its communicator, and why that communicator failed.
//!
//! The rank that ends first is often not the rank that failed first. The launcher therefore names the rank that the ranks
//! themselves found. It also asks each rank for its flight records before it ends any of them.
//!
//! A message is a datagram of lines `name=value`. The lines after `event` depend on it:
//!
//! ```text
//! job=1f3c…            the value of PHALANX_JOB
//! rank=0               the sender's PHALANX_RANK
//! process=4711         its process
//! event=failed         joined, failed, panicked, written (flight records), or metrics (counters)
//! answers=1            joined: whether it writes flight records on request
//! counts=1             joined: whether it tells its counters on request
//! ranks=2              ranks at fault, by PHALANX_RANK, where that is known
//! processes=4713       their processes, where that is known; joined: those that shrink has left out
//! why=rank 2 has left  the error
//! number=7             metrics: the number of the request, which is `metrics=7`
//! last=1               metrics: whether no further message answers it; a line for each series comes after an empty line
//! ```

use super::recorder::Recorder;
use super::{dump, metrics, signal};
use crate::os::LauncherSocket;
use crate::types::error::Error;
use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Environment variable with the name of the launcher's socket.
pub(crate) const LAUNCHER: &str = "PHALANX_LAUNCHER";
/// The longest reason, in characters.
const MAX_REASON: usize = 2000;
/// Most bytes of counters in a message.
const MAX_PART: usize = 32 << 10;

static LINK: OnceLock<Link> = OnceLock::new();

/// The connection to the launcher.
struct Link {
    socket: Arc<LauncherSocket>,
    job: String,
    rank: usize,
    /// The name of the communicator in which ranks have the launcher's numbers.
    world: OnceLock<String>,
    /// Whether a thread writes flight records on request.
    answers: AtomicBool,
}

impl Link {
    fn send(&self, event: &str, rest: impl Display) {
        let (job, rank, process) = (&self.job, self.rank, std::process::id());
        let message = format!("job={job}\nrank={rank}\nprocess={process}\nevent={event}\n{rest}");
        // Without a launcher there is nobody to tell.
        let _ = self.socket.send(message.as_bytes());
    }

    fn send_failure(&self, ranks: &[usize], processes: &[u32], error: &Error) {
        let why: String = error.to_string().replace('\n', " ").chars().take(MAX_REASON).collect();
        let (ranks, processes) = (List(ranks), List(processes));
        self.send("failed", format_args!("ranks={ranks}\nprocesses={processes}\nwhy={why}"));
    }
}

impl Link {
    /// Answers a request of the launcher: `write` for flight records, or `metrics=7`, where 7 is the request's number.
    fn answer(&self, request: &str) {
        let Some(number) = request.strip_prefix("metrics=") else {
            signal::write_missing();
            return self.send("written", "");
        };
        let send = |is_last: u8, part: &str| {
            self.send("metrics", format_args!("number={number}\nlast={is_last}\n\n{part}"));
        };
        // As many lines as are sure to fit into a message.
        let mut part = String::new();
        for line in metrics::lines() {
            if !part.is_empty() && part.len() + line.len() > MAX_PART {
                send(0, &part);
                part.clear();
            }
            part += &line;
            part.push('\n');
        }
        send(1, &part);
    }
}

struct List<'a, T>(&'a [T]);

impl<T: Display> Display for List<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let numbers: Vec<String> = self.0.iter().map(T::to_string).collect();
        f.write_str(&numbers.join(","))
    }
}

/// Connects to the launcher's socket of this name, once in a process. With a folder for flight records, or counters for monitoring, a
/// thread answers the launcher's requests for them.
pub(crate) fn connect(name: &str, job: &str, rank: usize) {
    if LINK.get().is_some() {
        return;
    }
    let socket = match LauncherSocket::connect(name) {
        Ok(socket) => Arc::new(socket),
        // A container with a network namespace of its own does not have the launcher's sockets.
        Err(error) => return crate::os::log::debug!(rank, "the launcher cannot be told anything: {error}"),
    };
    let records = dump::folder().is_some();
    let requests = (records || metrics::are_asked_for()).then(|| socket.clone());
    let (job, world, answers) = (job.to_owned(), OnceLock::new(), AtomicBool::new(false));
    let Ok(()) = LINK.set(Link { socket, job, rank, world, answers }) else { return };
    if let Some(requests) = requests {
        let serve = move || {
            while let Ok(request) = requests.recv() {
                LINK.get().iter().for_each(|link| link.answer(&request));
            }
        };
        match std::thread::Builder::new().name("phalanx-launcher".into()).spawn(serve) {
            Ok(_) => LINK.get().iter().for_each(|link| link.answers.store(records, Ordering::Relaxed)),
            Err(error) => crate::os::log::warn!(rank, "the launcher cannot ask for anything: {error}"),
        }
    }
}

/// Tells that this process is a rank of a communicator. `world` is its name if its ranks have the launcher's numbers.
pub(crate) fn joined(world: Option<&str>) {
    if let (Some(link), Some(name)) = (LINK.get(), world) {
        let _ = link.world.set(name.to_owned());
    }
    went_on_without(&[]);
}

/// Tells that this rank has overcome a failure, without these processes.
pub(crate) fn went_on_without(processes: &[u32]) {
    let Some(link) = LINK.get() else { return };
    let answers = u8::from(link.answers.load(Ordering::Relaxed));
    let counts = u8::from(metrics::are_asked_for());
    link.send("joined", format_args!("answers={answers}\ncounts={counts}\nprocesses={}", List(processes)));
}

/// Tells why this process could not become a rank. The error has the launcher's numbers.
pub(crate) fn not_joined(error: &Error) {
    LINK.get().iter().for_each(|link| link.send_failure(&error.ranks_at_fault(), &[], error));
}

/// Tells that a communicator has failed, and which ranks are at fault.
pub(crate) fn failed(recorder: &Recorder, error: &Error) {
    let Some(link) = LINK.get() else { return };
    // In a mismatch none of the two is more at fault than the other.
    let at_fault = if matches!(error, Error::Mismatch(_)) { Vec::new() } else { error.ranks_at_fault() };
    let processes: Vec<u32> = at_fault.iter().filter_map(|rank| recorder.process_of(*rank)).collect();
    let is_world = link.world.get().is_some_and(|world| world == recorder.name());
    link.send_failure(if is_world { &at_fault } else { &[] }, &processes, error);
}

/// Tells that this rank panics.
pub(crate) fn panicked() {
    LINK.get().iter().for_each(|link| link.send("panicked", ""));
}
