//! Processes of a trial: this program again, told by a variable what to do.

use rustix::thread::UnshareFlags;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// Longer than anything here takes when it works.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Says what a process does: `rank`, `launch`, `squat` or `secure`.
const ACT: &str = "MEETING_ACT";
/// The variables that a `launch` adds for the process that it starts: one `NAME=value` in a line.
const INNER: &str = "MEETING_INNER";
/// The abstract socket name that a `squat` takes.
const NAME: &str = "MEETING_NAME";

pub type Variables<'a> = &'a [(&'a str, &'a str)];

/// Does what this process was started for; `None` in the test itself.
pub fn act() -> Option<ExitCode> {
    let outcome = match &*std::env::var(ACT).ok()? {
        "rank" => rank(),
        "launch" => launch(),
        "squat" => squat(),
        "secure" => Ok(phalanx_sys::is_secure().to_string()),
        other => Err(format!("what is {other}?")),
    };
    Some(match outcome {
        Ok(said) => {
            println!("{said}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("error: {error}");
            ExitCode::FAILURE
        }
    })
}

/// A rank: says the sum of all ranks' numbers plus one.
fn rank() -> Result<String, String> {
    let comm = phalanx::init().map_err(|error| error.to_string())?;
    let mut sum = [comm.rank() as u64 + 1];
    comm.all_reduce_in_place(&mut sum, phalanx::ReduceOp::Sum).map_err(|error| error.to_string())?;
    Ok(format!("rank {} of {}: {}", comm.rank(), comm.world_size(), sum[0]))
}

/// A launcher inside another: starts a rank with further variables.
fn launch() -> Result<String, String> {
    let inner = std::env::var(INNER).map_err(|error| error.to_string())?;
    let inner: Vec<_> = inner.lines().filter_map(|line| line.split_once('=')).collect();
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let output = Command::new(program).env(ACT, "rank").envs(inner).output();
    let output = output.map_err(|error| error.to_string())?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Another user, who takes the name at which ranks would meet.
fn squat() -> Result<String, String> {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener};
    let name = std::env::var(NAME).map_err(|error| error.to_string())?;
    let address = SocketAddr::from_abstract_name(name).map_err(|error| error.to_string())?;
    let _listener = UnixListener::bind_addr(&address).map_err(|error| error.to_string())?;
    println!("taken");
    // Until the test closes this.
    let _ = std::io::stdin().read_line(&mut String::new());
    Ok(String::new())
}

fn command(act: &str, variables: Variables<'_>) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a path of its own"));
    command.env_clear().env(ACT, act).env("PHALANX_TIMEOUT", "20").env("PHALANX_BACKEND", "host");
    // No GPU is looked for.
    command.env("PHALANX_CUDA_LIB", "none: the test is not about GPUs").env("CUDA_VISIBLE_DEVICES", "");
    command.envs(variables.iter().copied());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    command
}

/// A process of a trial, killed if the trial ends before it.
pub struct Process {
    pub child: Option<Child>,
}

impl Process {
    /// A rank with these variables.
    pub fn rank(variables: Variables<'_>) -> Process {
        Process::started(command("rank", variables))
    }

    /// A process of the user `user` that runs `program`, a setuid copy of this one.
    pub fn setuid(program: &std::path::Path, user: u32, act: &str, variables: Variables<'_>) -> Process {
        let mut command = Command::new(program);
        command.env_clear().env(ACT, act).envs(variables.iter().copied()).uid(user).gid(user);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        Process::started(command)
    }

    /// A rank in namespaces of its own.
    pub fn rank_in(namespaces: UnshareFlags, variables: Variables<'_>) -> Process {
        let mut command = command("rank", variables);
        // A new PID namespace is for the children of the thread that made it.
        let started = move || {
            // SAFETY: this thread only starts the process, and ends.
            unsafe { rustix::thread::unshare_unsafe(namespaces) }.expect("the right to make namespaces");
            command.spawn().expect("a rank")
        };
        Process { child: Some(std::thread::spawn(started).join().expect("no panic")) }
    }

    /// A rank that an inner launcher starts with `inner`, itself started with `outer`.
    pub fn nested(outer: Variables<'_>, inner: Variables<'_>) -> Process {
        let lines: Vec<String> = inner.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let mut command = command("launch", outer);
        command.env(INNER, lines.join("\n"));
        Process::started(command)
    }

    /// A process of the user `user` that takes an abstract socket name; it has it when this returns.
    pub fn squatter(user: u32, name: &str) -> Process {
        use std::io::{BufRead, BufReader};
        let mut command = command("squat", &[(NAME, name)]);
        command.uid(user).gid(user);
        let mut process = Process::started(command);
        let said = process.child.as_mut().and_then(|child| child.stdout.as_mut()).expect("its output");
        let mut line = String::new();
        BufReader::new(said).read_line(&mut line).expect("its output");
        assert_eq!(line.trim(), "taken");
        process
    }

    fn started(mut command: Command) -> Process {
        Process { child: Some(command.spawn().expect("a process")) }
    }

    /// What it says at its end, and whether it succeeded.
    pub fn end(mut self) -> (String, bool) {
        let child = self.child.take().expect("it has not ended");
        let id = rustix::process::Pid::from_child(&child);
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || drop(sender.send(child.wait_with_output())));
        let output: Output = match receiver.recv_timeout(PATIENCE) {
            Ok(output) => output.expect("its output"),
            Err(_) => {
                let _ = rustix::process::kill_process(id, rustix::process::Signal::KILL);
                panic!("it has not ended within {PATIENCE:?}");
            }
        };
        (String::from_utf8_lossy(&output.stdout).trim().to_owned(), output.status.success())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
