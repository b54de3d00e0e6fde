//! Ranks that do not do the same: an error that names both calls, on every rank.

use super::common::{DEADLINE, Ground, MANY, has, one_verdict, report, says, with_cores};
use super::{Backend, Case, Effort};
use crate::mpi::Installation;
use crate::processes::Launch;
use crate::scenario::Outcome;
use crate::{Scenario, threads};
use phalanx::{Comm, Error, PreMulSum, ReduceOp, Result};
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[Scenario::rank("mismatch", one_case)];

/// The rank that does something else.
const DEVIANT: usize = 1;

/// Which of [`MANY`] do something else.
type Deviants = fn(usize) -> bool;
const MANY_DEVIANTS: [(&str, Deviants); 3] =
    [("a_rank", |rank| rank == 6), ("a_row", |rank| rank / 5 == 2), ("a_column", |rank| rank % 5 == 3)];

fn is_deviant(rank: usize, who: Option<&str>) -> bool {
    let many = MANY_DEVIANTS.iter().find(|(name, _)| Some(*name) == who);
    many.map_or(rank == DEVIANT, |(_, is_deviant)| is_deviant(rank))
}

/// Barriers before it, so that the number of the operation can be told from the first one.
const BEFORE: u64 = 3;

struct Call {
    name: &'static str,
    /// The call; the argument says whether this rank is the deviant.
    call: fn(&Comm, bool) -> Result<()>,
    /// What the error must say of the two calls: of either, in any order.
    says: &'static [&'static str],
    /// Whether it is about a message: those have a count of their own.
    message: bool,
    /// Whether each rank needs all others, so that the call itself must fail on all of them: else wrong data would pass for right.
    of_all: bool,
}

const fn collective(
    name: &'static str,
    says: &'static [&'static str],
    call: fn(&Comm, bool) -> Result<()>,
) -> Call {
    Call { name, call, says, message: false, of_all: false }
}

const fn exchange(
    name: &'static str,
    says: &'static [&'static str],
    call: fn(&Comm, bool) -> Result<()>,
) -> Call {
    Call { name, call, says, message: false, of_all: true }
}

const fn message(
    name: &'static str,
    says: &'static [&'static str],
    call: fn(&Comm, bool) -> Result<()>,
) -> Call {
    Call { name, call, says, message: true, of_all: false }
}

const SUM: ReduceOp = ReduceOp::Sum;

const CASES: &[Call] = &[
    collective("operation_small", &["all_reduce", "broadcast"], |comm, deviant| {
        let mut x = [1.0f32; 4];
        if deviant { comm.broadcast_in_place(&mut x, 0) } else { comm.all_reduce_in_place(&mut x, SUM) }
    }),
    exchange("operation_large", &["all_reduce", "reduce_scatter"], |comm, deviant| {
        let mut x = vec![1.0f32; 30_000 * comm.world_size()];
        if deviant {
            comm.reduce_scatter_in_place(&mut x, SUM)
        } else {
            comm.all_reduce_in_place(&mut x, SUM)
        }
    }),
    exchange("operation_or_barrier", &["all_gather", "barrier"], |comm, deviant| {
        let mut x = vec![0u8; 2 * comm.world_size()];
        if deviant { comm.barrier() } else { comm.all_gather_in_place(&mut x) }
    }),
    collective("operation_or_split", &["split", "barrier"], |comm, deviant| {
        if deviant { comm.split(Some(1), 0).map(drop) } else { comm.barrier() }
    }),
    exchange("count_small", &["all_reduce", "5", "6"], |comm, deviant| {
        comm.all_reduce_in_place(&mut vec![1i32; if deviant { 6 } else { 5 }], SUM)
    }),
    exchange("count_large", &["all_reduce", "100000", "100001"], |comm, deviant| {
        comm.all_reduce_in_place(&mut vec![1i32; if deviant { 100_001 } else { 100_000 }], SUM)
    }),
    exchange("count_small_or_large", &["all_reduce", "5", "100000"], |comm, deviant| {
        comm.all_reduce_in_place(&mut vec![1i32; if deviant { 100_000 } else { 5 }], SUM)
    }),
    collective("count_none_or_some", &["all_reduce", "0", "17"], |comm, deviant| {
        comm.all_reduce_in_place(&mut vec![1i32; if deviant { 0 } else { 17 }], SUM)
    }),
    exchange("count_shared", &["all_reduce", "300000", "200000"], |comm, deviant| {
        comm.all_reduce_in_place(&mut comm.alloc::<i32>(if deviant { 200_000 } else { 300_000 })?, SUM)
    }),
    collective("count_broadcast", &["broadcast", "70000", "60000"], |comm, deviant| {
        comm.broadcast_in_place(&mut vec![1i32; if deviant { 60_000 } else { 70_000 }], 0)
    }),
    collective("count_gather", &["gather", "3", "4"], |comm, deviant| {
        let count = if deviant { 4 } else { 3 };
        comm.gather_in_place(&mut vec![1i32; count * comm.world_size()], 0)
    }),
    collective("count_scatter", &["scatter", "3", "4"], |comm, deviant| {
        let count = if deviant { 4 } else { 3 };
        comm.scatter_in_place(&mut vec![1i32; count * comm.world_size()], 0)
    }),
    exchange("count_reduce_scatter", &["reduce_scatter", "9000", "9001"], |comm, deviant| {
        let count = if deviant { 9001 } else { 9000 };
        comm.reduce_scatter_in_place(&mut vec![1i32; count * comm.world_size()], SUM)
    }),
    exchange("count_all_to_all", &["all_to_all", "5", "6"], |comm, deviant| {
        let count = if deviant { 6 } else { 5 };
        comm.all_to_all_in_place(&mut vec![1i32; count * comm.world_size()])
    }),
    exchange("count_all_to_all_large", &["all_to_all", "50000", "5"], |comm, deviant| {
        let count = if deviant { 5 } else { 50_000 };
        comm.all_to_all_in_place(&mut vec![1i32; count * comm.world_size()])
    }),
    exchange("dtype", &["all_reduce", "f32", "i32"], |comm, deviant| {
        if deviant {
            comm.all_reduce_in_place(&mut [1i32; 9], SUM)
        } else {
            comm.all_reduce_in_place(&mut [1f32; 9], SUM)
        }
    }),
    exchange("dtype_of_other_size", &["all_gather", "u8", "f64"], |comm, deviant| {
        if deviant {
            comm.all_gather_in_place(&mut vec![1u8; 8 * comm.world_size()])
        } else {
            comm.all_gather_in_place(&mut vec![1f64; comm.world_size()])
        }
    }),
    exchange("reduction", &["all_reduce", "sum", "max"], |comm, deviant| {
        comm.all_reduce_in_place(&mut [1f32; 9], if deviant { ReduceOp::Max } else { SUM })
    }),
    exchange("reduction_large", &["all_reduce", "sum", "avg"], |comm, deviant| {
        comm.all_reduce_in_place(&mut vec![1f32; 99_999], if deviant { ReduceOp::Avg } else { SUM })
    }),
    exchange("pre_mul_sum", &["all_reduce", "sum", "pre-mul-sum"], |comm, deviant| {
        let mut x = [1f32; 9];
        if deviant {
            comm.all_reduce_in_place(&mut x, PreMulSum(2.0))
        } else {
            comm.all_reduce_in_place(&mut x, SUM)
        }
    }),
    collective("root_broadcast", &["broadcast", "root 0", "root 1"], |comm, deviant| {
        comm.broadcast_in_place(&mut [1f32; 9], usize::from(deviant))
    }),
    collective("root_broadcast_large", &["broadcast", "root 0", "root 1"], |comm, deviant| {
        comm.broadcast_in_place(&mut vec![1f32; 90_000], usize::from(deviant))
    }),
    collective("root_reduce", &["reduce", "root 0", "root 1"], |comm, deviant| {
        comm.reduce_in_place(&mut [1f32; 9], SUM, usize::from(deviant))
    }),
    collective("root_gather", &["gather", "root 0", "root 1"], |comm, deviant| {
        comm.gather_in_place(&mut vec![1f32; comm.world_size()], usize::from(deviant))
    }),
    collective("root_scatter", &["scatter", "root 0", "root 1"], |comm, deviant| {
        comm.scatter_in_place(&mut vec![1f32; comm.world_size()], usize::from(deviant))
    }),
    collective("order", &["barrier", "all_reduce"], |comm, deviant| {
        let mut x = [1f32; 9];
        if deviant {
            comm.barrier()?;
            comm.all_reduce_in_place(&mut x, SUM)
        } else {
            comm.all_reduce_in_place(&mut x, SUM)?;
            comm.barrier()
        }
    }),
    exchange("counts_v", &["all_gather_v"], |comm, deviant| {
        let mut counts = vec![3; comm.world_size()];
        counts[DEVIANT] = if deviant { 5 } else { 4 };
        let send = vec![1u16; counts[comm.rank()]];
        comm.all_gather_v(&send, &mut vec![0u16; counts.iter().sum()], &counts)
    }),
    exchange("counts_v_same_sum", &["reduce_scatter_v"], |comm, deviant| {
        let mut counts = vec![3; comm.world_size()];
        counts.swap(0, DEVIANT);
        if deviant {
            counts[0] += 1;
            counts[DEVIANT] -= 1;
        }
        let send = vec![1u16; counts.iter().sum()];
        comm.reduce_scatter_v(&send, &mut vec![0u16; counts[comm.rank()]], &counts, SUM)
    }),
    collective("counts_gather_v", &["gather_v"], |comm, deviant| {
        let mut counts = vec![3; comm.world_size()];
        counts[DEVIANT] = if deviant { 5 } else { 4 };
        let send = vec![1u16; counts[comm.rank()]];
        comm.gather_v(&send, &mut vec![0u16; counts.iter().sum()], &counts, 0)
    }),
    collective("counts_scatter_v", &["scatter_v"], |comm, deviant| {
        let mut counts = vec![3000; comm.world_size()];
        counts[DEVIANT] = if deviant { 5000 } else { 4000 };
        let send = vec![1u16; counts.iter().sum()];
        comm.scatter_v(&send, &counts, &mut vec![0u16; counts[comm.rank()]], 0)
    }),
    collective("counts_gather_v_in_place", &["gather_v"], |comm, deviant| {
        let mut counts = vec![3; comm.world_size()];
        counts[DEVIANT] = if deviant { 5 } else { 4 };
        comm.gather_v_in_place(&mut vec![1u16; counts.iter().sum()], &counts, 0)
    }),
    exchange("counts_reduce_scatter_v_in_place", &["reduce_scatter_v"], |comm, deviant| {
        let mut counts = vec![3000; comm.world_size()];
        counts.swap(0, DEVIANT);
        if deviant {
            counts[0] += 1;
            counts[DEVIANT] -= 1;
        }
        comm.reduce_scatter_v_in_place(&mut vec![1u16; counts.iter().sum()], &counts, SUM)
    }),
    exchange("counts_all_gather_v_request", &["all_gather_v"], |comm, deviant| {
        let mut counts = vec![3; comm.world_size()];
        counts[DEVIANT] = if deviant { 5 } else { 4 };
        let (send, recv) = (vec![1u16; counts[comm.rank()]], vec![0u16; counts.iter().sum()]);
        comm.start_all_gather_v(send, recv, counts)?.wait().map(drop)
    }),
    exchange("request", &["all_reduce", "5", "6"], |comm, deviant| {
        let request = comm.start_all_reduce(vec![1i32; if deviant { 6 } else { 5 }], SUM)?;
        request.wait().map(drop)
    }),
    message("counts_all_to_all_v", &["all_to_all_v"], |comm, deviant| {
        let ranks = comm.world_size();
        let (mut send_counts, recv_counts) = (vec![4; ranks], vec![4; ranks]);
        if deviant {
            send_counts[0] = 3;
        }
        let send = vec![1u32; send_counts.iter().sum()];
        comm.all_to_all_v(&send, &send_counts, &mut vec![0u32; 4 * ranks], &recv_counts)
    }),
    message("counts_all_to_all_v_in_place", &["all_to_all_v", "× 3", "× 4"], |comm, deviant| {
        let mut counts = vec![4; comm.world_size()];
        if deviant {
            counts[0] = 3;
        }
        comm.all_to_all_v_in_place(&mut vec![1u32; counts.iter().sum()], &counts)
    }),
    message(
        "counts_all_to_all_v_in_place_large",
        &["all_to_all_v", "× 300000", "× 400000"],
        |comm, deviant| {
            let mut counts = vec![400_000; comm.world_size()];
            if deviant {
                counts[0] = 300_000;
            }
            comm.all_to_all_v_in_place(&mut vec![1u32; counts.iter().sum()], &counts)
        },
    ),
    message("counts_all_to_all_v_request", &["all_to_all_v", "× 3", "× 4"], |comm, deviant| {
        let (mut sent, received) = (vec![4; comm.world_size()], vec![4; comm.world_size()]);
        if deviant {
            sent[0] = 3;
        }
        let (send, recv) = (vec![1u32; sent.iter().sum()], vec![0u32; received.iter().sum()]);
        comm.start_all_to_all_v(send, sent, recv, received)?.wait().map(drop)
    }),
    message("message_count_small", &["send", "recv", "5", "6"], |comm, deviant| match comm.rank() {
        0 => comm.recv(&mut [0u32; 6], DEVIANT),
        _ if deviant => comm.send(&[1u32; 5], 0),
        _ => Ok(()),
    }),
    message("message_count_large", &["send", "recv", "500000", "600000"], |comm, deviant| {
        match comm.rank() {
            0 => comm.recv(&mut vec![0u32; 600_000], DEVIANT),
            _ if deviant => comm.send(&vec![1u32; 500_000], 0),
            _ => Ok(()),
        }
    }),
    message("message_too_long", &["send", "recv", "9000", "8"], |comm, deviant| match comm.rank() {
        0 => comm.recv(&mut [0u32; 8], DEVIANT),
        _ if deviant => comm.send(&vec![1u32; 9000], 0),
        _ => Ok(()),
    }),
    message("message_dtype", &["send", "recv", "u32", "f32"], |comm, deviant| match comm.rank() {
        0 => comm.recv(&mut [0u32; 6], DEVIANT),
        _ if deviant => comm.send(&[1f32; 6], 0),
        _ => Ok(()),
    }),
];

/// On the host: NCCL has no tags.
const PUT_ASIDE: Call =
    message("message_before_its_receive", &["send", "recv", "5", "6"], |comm, deviant| match comm.rank() {
        0 => {
            // The other one comes first, and is put aside.
            comm.recv_tagged(&mut [0u32; 1], DEVIANT, 2)?;
            comm.recv_tagged(&mut [0u32; 6], DEVIANT, 1)
        }
        _ if deviant => {
            comm.send_tagged(&[1u32; 5], 0, 1)?;
            comm.send_tagged(&[1u32; 1], 0, 2)
        }
        _ => Ok(()),
    });

/// Among [`MANY`] ranks, of which those that do what is right go in rounds.
const IN_ROUNDS: &[Call] = &[
    exchange("rounds_count", &["all_reduce", "100", "101"], |comm, deviant| {
        comm.all_reduce_in_place(&mut vec![1i32; if deviant { 101 } else { 100 }], SUM)
    }),
    collective("rounds_or_bulk", &["all_reduce", "100", "100000"], |comm, deviant| {
        comm.all_reduce_in_place(&mut vec![1i32; if deviant { 100_000 } else { 100 }], SUM)
    }),
    exchange("rounds_reduction", &["all_reduce", "sum", "max"], |comm, deviant| {
        comm.all_reduce_in_place(&mut [1f32; 33], if deviant { ReduceOp::Max } else { SUM })
    }),
    exchange("rounds_pre_mul_sum", &["all_reduce", "sum", "pre-mul-sum"], |comm, deviant| {
        let mut x = [1f32; 33];
        if deviant {
            comm.all_reduce_in_place(&mut x, PreMulSum(2.0))
        } else {
            comm.all_reduce_in_place(&mut x, SUM)
        }
    }),
    collective("rounds_or_barrier", &["all_reduce", "barrier"], |comm, deviant| {
        if deviant { comm.barrier() } else { comm.all_reduce_in_place(&mut [1f32; 33], SUM) }
    }),
    collective("rounds_or_reduce", &["all_reduce", "reduce("], |comm, deviant| {
        let mut x = [1f32; 33];
        if deviant { comm.reduce_in_place(&mut x, SUM, 0) } else { comm.all_reduce_in_place(&mut x, SUM) }
    }),
];

pub fn cases(backend: Backend) -> Vec<Case> {
    let mut cases = Vec::new();
    if backend == Backend::Host && cfg!(target_os = "linux") {
        for (who, _) in MANY_DEVIANTS {
            cases.push(Case::new(format!("processes/mismatch/rounds/{who}"), move || {
                IN_ROUNDS.iter().try_for_each(|case| in_rounds(case, who))
            }));
        }
    }
    let put_aside = (backend == Backend::Host).then_some(&PUT_ASIDE);
    for case in CASES.iter().chain(put_aside) {
        if backend == Backend::Host {
            cases.push(Case::new(format!("threads/mismatch/{}", case.name), move || {
                [2, 3, 5].into_iter().try_for_each(|ranks| on_threads(case, ranks))
            }));
        }
        if cfg!(target_os = "linux") {
            cases.push(Case::new(format!("processes/mismatch/{}", case.name), move || {
                [2, 4].into_iter().try_for_each(|ranks| on_processes(backend, case, ranks))
            }));
        }
    }
    if backend == Backend::Host {
        cases.push(Case::new("threads/mismatch/waiting_for_different_things", deadlock_on_threads));
    }
    cases
}

/// In MPI's checked mode.
pub fn mpi_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, found) in Installation::all() {
        let installation = found.clone().ok();
        // An mpirun takes its time: a test does some of them.
        let case = Case::soak(format!("{name}/mismatch"), move |effort| {
            let installation = installation.as_ref().ok_or("it is not installed")?;
            let collectives = CASES.iter().filter(|case| !case.message);
            let step = if effort == Effort::Full { 1 } else { 5 };
            collectives.step_by(step).try_for_each(|case| in_a_job(installation, case))
        });
        cases.push(case.ignored(found.err()));
    }
    cases
}

/// The ranks get the same error, and the job ends well, since MPI has got nothing of the calls that differ.
fn in_a_job(installation: &Installation, case: &'static Call) -> std::result::Result<(), String> {
    let job = installation.job(2).scenario("mismatch", &[case.name]).env("PHALANX_CHECK", "1");
    let ended = job.succeed().map_err(|problem| format!("{}: {problem}", case.name))?;
    let reports: Vec<String> = ended.outcomes.into_iter().flatten().collect();
    expect(case, &reports, 2, None).map_err(|problem| format!("{}: {problem}", case.name))
}

fn one_case(comm: Comm, args: &[String]) -> Outcome {
    let case = CASES
        .iter()
        .chain(IN_ROUNDS)
        .chain([&PUT_ASIDE])
        .find(|case| case.name == args[0])
        .ok_or("no such case")?;
    comm.set_timeout(Duration::from_secs(20));
    for _ in 0..BEFORE {
        comm.barrier().map_err(|error| error.to_string())?;
    }
    let since = Instant::now();
    let deviant = is_deviant(comm.rank(), args.get(1).map(String::as_str));
    // A rank that only gives (to a root, in a message) may be done before anybody sees what it gave; the
    // next operation tells it.
    let mut result = (case.call)(&comm, deviant);
    if case.of_all && result.is_ok() {
        return Err("the call itself succeeded".into());
    }
    for _ in 0..2 {
        result = result.and_then(|()| comm.barrier());
    }
    match result {
        Ok(()) => Err("no rank noticed anything".into()),
        Err(error @ Error::Mismatch(_)) => Ok(report(comm, &error, since.elapsed())?.to_string()),
        Err(other) => Err(format!("another error: {other}")),
    }
}

fn on_threads(case: &'static Call, ranks: usize) -> std::result::Result<(), String> {
    let outcomes = threads::run_scenario(&SCENARIOS[0], ranks, &[case.name.to_owned()], DEADLINE)?;
    let reports: std::result::Result<Vec<String>, String> = outcomes.iter().cloned().collect();
    let reports = reports.map_err(|_| format!("{ranks} thread ranks: {outcomes:#?}"))?;
    expect(case, &reports, ranks, None).map_err(|problem| format!("{ranks} thread ranks: {problem}"))
}

fn on_processes(backend: Backend, case: &'static Call, ranks: usize) -> std::result::Result<(), String> {
    // NCCL compares in checked mode.
    let launch = Launch::new("mismatch", ranks).arg(case.name).env("PHALANX_CHECK", "1").deadline(DEADLINE);
    let reports = Ground::new(backend)?.launch(launch).reports()?;
    expect(case, &reports, ranks, None).map_err(|problem| format!("{ranks} process ranks: {problem}"))
}

fn in_rounds(case: &'static Call, who: &str) -> std::result::Result<(), String> {
    let launch = Launch::new("mismatch", MANY).arg(case.name).arg(who).deadline(DEADLINE);
    let reports = with_cores(launch, MANY).reports()?;
    expect(case, &reports, MANY, Some(who)).map_err(|problem| format!("{}: {problem}", case.name))
}

fn expect(
    case: &Call,
    reports: &[String],
    ranks: usize,
    who: Option<&str>,
) -> std::result::Result<(), String> {
    let verdict = one_verdict(reports, ranks)?;
    has(&verdict, "fatal", true)?;
    // Some rank is named against a deviant; the higher one comes first.
    let pair = (verdict.number("rank"), verdict.number("other_rank"));
    let (Some(high), Some(low)) = pair else {
        return Err(format!("no ranks in {verdict}"));
    };
    if low >= high || is_deviant(high as usize, who) == is_deviant(low as usize, who) {
        return Err(format!("ranks {high} and {low} are not the ones that differ: {verdict}"));
    }
    if !case.message {
        has(&verdict, "sequence", BEFORE + 1)?;
    }
    let calls = format!("{} / {}", verdict.get("theirs").unwrap_or(""), verdict.get("ours").unwrap_or(""));
    for part in case.says {
        if !calls.contains(part) {
            return Err(format!("{part:?} is not in {calls:?}"));
        }
        says(&verdict, "text", part)?;
    }
    Ok(())
}

/// Two ranks that wait for messages which nobody sends: nothing differs, so the deadline must tell.
fn deadlock_on_threads() -> std::result::Result<(), String> {
    let outcomes = threads::run(3, DEADLINE, |comm| {
        comm.set_timeout(Duration::from_millis(500));
        let since = Instant::now();
        let result = match comm.rank() {
            0 => comm.recv(&mut [0u8; 3], 1),
            1 => comm.recv(&mut [0u8; 3], 0),
            _ => comm.barrier(),
        };
        match result {
            Ok(()) => Err("a message that nobody sent has arrived".into()),
            Err(error) => Ok(report(comm, &error, since.elapsed())?.to_string()),
        }
    })?;
    let reports = outcomes.into_iter().collect::<std::result::Result<Vec<_>, String>>()?;
    let verdict = one_verdict(&reports, 3)?;
    has(&verdict, "kind", "timeout")?;
    // One of the two, or both: the third only waits for them.
    match verdict.get("missing") {
        Some("0" | "1" | "0,1") => Ok(()),
        other => Err(format!("{other:?} is missing: {verdict}")),
    }
}
