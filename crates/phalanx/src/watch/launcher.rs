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
//! event=failed         joined, failed, panicked, or written (flight records)
//! answers=1            joined: whether it writes flight records on request
//! ranks=2              ranks at fault, by PHALANX_RANK, where that is known
//! processes=4713       their processes, where that is known
//! why=rank 2 has left  the error
//! ```

use super::dump;
use super::recorder::Recorder;
use super::signal;
use crate::os::LauncherSocket;
use crate::types::error::Error;
use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Environment variable with the name of the launcher's socket.
pub(crate) const LAUNCHER: &str = "PHALANX_LAUNCHER";
/// The longest reason, in characters.
const MAX_REASON: usize = 2000;

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

    fn send_failure(&self, ranks: &[usize], processes: &[u32], why: &Error) {
        let why: String = why.to_string().replace('\n', " ").chars().take(MAX_REASON).collect();
        self.send("failed", format_args!("ranks={}\nprocesses={}\nwhy={why}", List(ranks), List(processes)));
    }
}

struct List<'a, T>(&'a [T]);

impl<T: Display> Display for List<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let numbers: Vec<String> = self.0.iter().map(T::to_string).collect();
        f.write_str(&numbers.join(","))
    }
}

/// Connects to the launcher's socket of this name, once in a process. With a folder for flight records, a thread writes them when
/// the launcher asks for them.
pub(crate) fn connect(name: &str, job: &str, rank: usize) {
    if LINK.get().is_some() {
        return;
    }
    let socket = match LauncherSocket::connect(name) {
        Ok(socket) => Arc::new(socket),
        // A container with a network namespace of its own does not have the launcher's sockets.
        Err(error) => return crate::os::log::debug!(rank, "the launcher cannot be told anything: {error}"),
    };
    let requests = dump::folder().is_some().then(|| socket.clone());
    let (job, world, answers) = (job.to_owned(), OnceLock::new(), AtomicBool::new(false));
    let Ok(()) = LINK.set(Link { socket, job, rank, world, answers }) else { return };
    if let Some(requests) = requests {
        let serve = move || {
            while requests.wait().is_ok() {
                signal::write_missing();
                LINK.get().iter().for_each(|link| link.send("written", ""));
            }
        };
        match std::thread::Builder::new().name("phalanx-launcher".into()).spawn(serve) {
            Ok(_) => LINK.get().iter().for_each(|link| link.answers.store(true, Ordering::Relaxed)),
            Err(error) => crate::os::log::warn!(rank, "the launcher cannot ask for flight records: {error}"),
        }
    }
}

/// Tells that this process is a rank of a communicator, made at the start or after a failure, which is overcome then. `world` is its
/// name if its ranks have the launcher's numbers.
pub(crate) fn joined(world: Option<&str>) {
    let Some(link) = LINK.get() else { return };
    if let Some(name) = world {
        let _ = link.world.set(name.to_owned());
    }
    let answers = u8::from(link.answers.load(Ordering::Relaxed));
    link.send("joined", format_args!("answers={answers}"));
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
