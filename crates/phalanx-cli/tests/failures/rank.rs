//! This test program as a rank that computes in steps, has a fault at one of them, and recovers, or not, from those of others.

use super::common::phalanx;
use phalanx::{Comm, ReduceOp};
use phalanx_train::elastic::{Model, Recovery, Trainer};
use rustix::process::{Signal, getpid, kill_process};
use std::fmt::Display;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

const RECOVERY: &str = "FAILURES_TEST_RECOVERY";
const FAULTS: &str = "FAILURES_TEST_FAULTS";
const FOLDER: &str = "FAILURES_TEST_FOLDER";
/// A file that a rank makes when it has shrunk its communicator.
const SHRUNK: &str = "shrunk";
/// Steps of the computation.
const STEPS: u64 = 60;
/// Longer than any wait of these tests.
const TIMEOUT: Duration = Duration::from_secs(40);

/// When a newcomer comes, and when a rank dies that waits for it.
const SLOW_NEWCOMER: Duration = Duration::from_millis(900);
const DIES_WAITING: Duration = Duration::from_millis(450);

/// For a newcomer to start.
const NEWCOMER_TIMEOUT: Duration = Duration::from_secs(6);

/// `phalanx launch` of this program with these options. The ranks recover as `recovery` says: `fail`, `shrink`, `rebuild`, `rebuild slowly` (newcomers take their
/// time), `rebuild or shrink`, or `train` (a trainer's `rebuild or shrink`). Each of
/// `faults` is one fault of a rank at a step, as `kill@10:2`, or before it joins, as `exit 3@start:2`; it happens once. The folder is for the program's own use.
pub fn launch(options: &str, recovery: &str, faults: &str, folder: &Path) -> Command {
    let mut command = phalanx(&format!("launch {options} --"));
    command.arg(std::env::current_exe().unwrap());
    command.env(RECOVERY, recovery).env(FAULTS, faults).env(FOLDER, folder).env_remove("RUST_BACKTRACE");
    command
}

/// In a process that a test started: computes.
pub fn serve() -> Option<ExitCode> {
    let recovery = std::env::var(RECOVERY).ok()?;
    let computed = compute(&recovery).map_err(|error| eprintln!("error: {error}"));
    Some(if computed.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn compute(recovery: &str) -> phalanx::Result<()> {
    fault("start");
    if let Ok(replaced) = std::env::var("PHALANX_REPLACES") {
        let of = |name: &str| std::env::var(format!("PHALANX_{name}")).unwrap_or_default();
        let [rank, ranks] = ["RANK", "WORLD_SIZE"].map(of);
        let [local, local_ranks] = ["LOCAL_RANK", "LOCAL_WORLD_SIZE"].map(of);
        println!("in place of {replaced}: {rank} of {ranks}, here {local} of {local_ranks}");
    }
    if std::env::var_os("PHALANX_REPLACES").is_some() && recovery == "rebuild slowly" {
        std::thread::sleep(SLOW_NEWCOMER);
    }
    let mut comm = Comm::builder().timeout(TIMEOUT).init()?;
    if recovery == "train" {
        train(comm).expect("it survives");
        return Ok(());
    }
    let mut step = 0;
    loop {
        match run(&comm, &mut step) {
            Ok(Next::Leave) => return Ok(()),
            Ok(Next::Done) => break,
            Err(error) if error.is_fatal() && recovery == "shrink" => {
                comm = comm.shrink()?;
                std::fs::write(in_folder(SHRUNK), "").expect("the folder is there");
            }
            Err(error) if error.is_fatal() && recovery == "rebuild" => comm = comm.rebuild()?,
            Err(error) if error.is_fatal() && recovery == "rebuild slowly" => comm = comm.rebuild()?,
            Err(error) if error.is_fatal() && recovery == "rebuild or shrink" => {
                let rebuilt = comm.within(NEWCOMER_TIMEOUT).rebuild();
                comm = rebuilt.or_else(|_| comm.shrink())?;
            }
            Err(error) => return Err(error),
        }
    }
    println!("done among {}", comm.world_size());
    Ok(())
}

/// Sums over all samples, of which each rank has a part.
struct Sum(u64);

/// Samples of a step, over all ranks.
const SAMPLES: u64 = 30;

impl Model for Sum {
    fn step(&mut self, comm: &Comm, step: u64) -> phalanx_train::Result<()> {
        fault(step);
        let own = (0..SAMPLES).skip(comm.rank()).step_by(comm.world_size());
        let mut sum = [own.map(|sample| sample * step).sum::<u64>()];
        comm.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
        self.0 += sum[0];
        Ok(())
    }

    fn save(&self, state: &mut Vec<u8>) -> phalanx_train::Result<()> {
        state.extend(self.0.to_le_bytes());
        Ok(())
    }

    fn load(&mut self, state: &[u8]) -> phalanx_train::Result<()> {
        self.0 = u64::from_le_bytes(state.try_into().expect("eight bytes"));
        Ok(())
    }
}

fn train(comm: Comm) -> phalanx_train::Result<()> {
    let mut model = Sum(0);
    let trainer = Trainer::new(Recovery::RebuildOrShrink(NEWCOMER_TIMEOUT)).snapshot_every(4)?;
    let comm = trainer.run(comm, &mut model, STEPS)?.comm;
    let undisturbed = SAMPLES * (SAMPLES - 1) / 2 * STEPS * (STEPS - 1) / 2;
    assert_eq!(model.0, undisturbed, "the result of an undisturbed run");
    println!("done among {}", comm.world_size());
    Ok(())
}

enum Next {
    Done,
    Leave,
}

/// Computes from the step of rank 0 on.
fn run(comm: &Comm, step: &mut u64) -> phalanx::Result<Next> {
    let mut agreed = [*step];
    comm.broadcast_in_place(&mut agreed, 0)?;
    *step = agreed[0];
    while *step < STEPS {
        if let Some(next) = fault(*step) {
            return Ok(next);
        }
        let mut ranks = [1u64];
        comm.all_reduce_in_place(&mut ranks, ReduceOp::Sum)?;
        assert_eq!(ranks[0], comm.world_size() as u64);
        *step += 1;
    }
    comm.barrier()?;
    Ok(Next::Done)
}

fn in_folder(name: &str) -> String {
    format!("{}/{name}", std::env::var(FOLDER).unwrap())
}

/// Carries out this rank's fault at this step, or at the start, if it has one that has not happened yet.
fn fault(step: impl Display) -> Option<Next> {
    let faults = std::env::var(FAULTS).unwrap();
    let rank = std::env::var("PHALANX_RANK").unwrap();
    let place = format!("@{step}:{rank}");
    let happens = |(index, fault): &(usize, &str)| {
        fault.ends_with(&place) && std::fs::File::create_new(in_folder(&format!("fault-{index}"))).is_ok()
    };
    let (_, fault) = faults.split(',').enumerate().find(happens)?;
    match fault.split('@').next().unwrap() {
        "kill" => end_by(Signal::KILL),
        "segfault" => end_by(Signal::SEGV),
        "abort" => std::process::abort(),
        "exit 3" => std::process::exit(3),
        "exit 0" => std::process::exit(0),
        "panic" => panic!("a fault of rank {rank}"),
        "return" => Some(Next::Leave),
        "return late" => {
            std::thread::sleep(Duration::from_millis(500));
            Some(Next::Leave)
        }
        // It calls nothing for a long time, and notices nothing.
        "compute" => {
            std::thread::sleep(TIMEOUT);
            None
        }
        "doze" => {
            std::thread::sleep(Duration::from_millis(500));
            None
        }
        "kill waiting" => {
            std::thread::spawn(|| {
                std::thread::sleep(DIES_WAITING);
                end_by(Signal::KILL)
            });
            None
        }
        "stop" => {
            kill_process(getpid(), Signal::STOP).unwrap();
            None
        }
        // It goes on a little later than the others.
        "stop for a while" => {
            let wait = format!("until [ -e {} ]; do sleep 0.02; done; sleep 0.5", in_folder(SHRUNK));
            let script = format!("{wait}; kill -CONT {}", std::process::id());
            let mut shell = Command::new("sh").args(["-c", &script]).spawn().expect("a shell");
            kill_process(getpid(), Signal::STOP).unwrap();
            shell.wait().expect("it has ended");
            None
        }
        // It tells the launcher, as a rank of another job, that rank 2 is at fault.
        "forge" => {
            let report = format!(
                "job=another\nrank={rank}\nprocess={}\nevent=failed\nranks=2\nprocesses=\nwhy=forged",
                std::process::id()
            );
            let launcher = std::env::var("PHALANX_LAUNCHER").expect("the launcher's socket");
            let launcher = SocketAddr::from_abstract_name(launcher).expect("a name");
            let socket = UnixDatagram::unbound().expect("a socket");
            socket.send_to_addr(report.as_bytes(), &launcher).expect("the launcher listens");
            None
        }
        // It has a fault when the others are in an operation, or call nothing.
        "kill late" => {
            std::thread::sleep(Duration::from_millis(100));
            end_by(Signal::KILL)
        }
        fault => unreachable!("there is no fault {fault}"),
    }
}

fn end_by(signal: Signal) -> ! {
    loop {
        // Rust's handler of SIGSEGV takes the first for a stack overflow that it was not, and restores the default.
        kill_process(getpid(), signal).unwrap();
    }
}
