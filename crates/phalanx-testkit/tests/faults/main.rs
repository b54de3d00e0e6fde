//! The fault suite in its short form: every case of [`phalanx_testkit::faults`] once.
//!
//! `cargo test -p phalanx-testkit --test faults -- <part of a name>` runs a part of it.

use libtest_mimic::{Arguments, Failed, Trial};
use phalanx_testkit::faults::{self, Backend, Case, Effort};
use phalanx_testkit::suite::{self, Share};
use phalanx_testkit::{networked, processes};
use std::process::{Command, ExitCode};

/// The seed of the cases that have one; the suite's program tries many.
const SEED: u64 = 1;

/// How much of the suite a sample is. Most of these cases wait for a deadline. CI runs the last line's for ranks that are
/// threads, processes and NCCL's, and a contributor once.
const SHARES: &[Share] = &[
    ("own_kernels/", 12),
    ("/life/", 7),
    ("/deadline/", 7),
    ("/stopped/", 8),
    ("/killed/", 4),
    ("/environment/", 5),
    ("/limits/files_of_processes", 8),
    ("/limits/", 4),
    ("/grow/", 4),
    ("/shrink/", 3),
    ("/leaks/", 4),
    ("/", 1),
];

/// What waits for seconds, and has a shorter trial of its kind beside it.
const SLOW: &[&str] = &[
    "ucx/hosts/",
    "/missing_rank_0",
    "abort_at_once",
    "a_late_rank_comes_back",
    "deadline/started_recv",
    "error_stream/exit/closed",
    "error_stream/exit/full",
    "life/late",
    "one_does_not_return",
    "stopped/for_a_while",
    "stopped_as_a_whole",
    "threads-life-late",
    "threads/deadline/",
    "by_a_debugger_until",
    "deadline/split",
    "error_stream/exit/not_read",
    "error_stream/exit/no_reader",
    "one_sided/late",
    "one_sided/written_later",
];

fn main() -> ExitCode {
    if let Some(code) = processes::serve(&faults::scenarios()) {
        return code;
    }
    let mut args = Arguments::from_args();
    // Deadlines are measured: trials must not take the cores from one another.
    args.test_threads.get_or_insert(1);
    let trials = Backend::ALL
        .into_iter()
        .flat_map(|backend| backend.cases().into_iter().map(move |case| trial(backend, case)));
    let own_kernels = Backend::Nccl.cases().into_iter().filter(|case| case.ignored.is_none()).enumerate();
    let own_kernels = own_kernels.map(|(place, case)| with_own_kernels(place, case.name));
    let code = suite::run(&args, trials.chain(own_kernels).collect(), SHARES, SLOW);
    networked::end();
    code
}

/// A case of NCCL's where phalanx's own kernels carry collectives out, in a process of its own.
fn with_own_kernels(place: usize, name: String) -> Trial {
    let algorithm = ["ll", "ll128", "auto", "two_hops_ll128"][place % 4];
    // In one word, so that by default these do not run in place of NCCL's own cases.
    let word = name.replace('/', "-");
    Trial::test(format!("own_kernels/{algorithm}/{word}"), move || {
        let mut suite = Command::new(std::env::current_exe()?);
        let suite = suite.args(["--exact", &format!("nccl/{name}")]).env(faults::OWN_KERNELS, algorithm);
        let ended = suite.output()?;
        let (out, err) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
        match ended.status.success() && out.contains("1 passed") {
            true => Ok(()),
            false => Err(Failed::from(format!("{}: {out}{err}", ended.status))),
        }
    })
}

fn trial(backend: Backend, case: Case) -> Trial {
    let name = match backend {
        Backend::Host => case.name.clone(),
        other => format!("{}/{}", other.name(), case.name),
    };
    match case.ignored.clone() {
        Some(reason) => suite::ignored(name, reason),
        None => Trial::test(name, move || Ok(case.run(SEED, Effort::Short)?)),
    }
}
