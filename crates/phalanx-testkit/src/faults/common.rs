//! What the fault trials share: reports of failed ranks, and comparing them.

use super::Backend;
#[cfg(target_os = "linux")]
use crate::emulated::Emulated;
use crate::processes::Launch;
use crate::{Fields, verdict};
use phalanx::{Comm, Error, ReduceOp};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

/// A world that takes longer hangs.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Ranks of which not all hear each other, if each has a core of its own: five rows of five.
pub const MANY: usize = 25;

/// As if so many ranks had a core of their own each; else they go another way.
pub fn with_cores(launch: Launch, ranks: usize) -> Launch {
    launch.env("PHALANX_CORES", &ranks.to_string())
}

/// How long dropping a failed communicator may take.
const DROP_LIMIT: Duration = Duration::from_secs(2);

/// The algorithm of own kernels that NCCL's cases use, if they shall (not `PHALANX_…`: those are taken from ranks).
pub const OWN_KERNELS: &str = "TESTKIT_OWN_KERNELS";

/// What the processes of a case need to find, for as long as they run.
pub struct Ground {
    #[cfg(target_os = "linux")]
    emulated: Option<Emulated>,
}

impl Ground {
    /// For ranks on this backend.
    #[cfg(target_os = "linux")]
    pub fn new(backend: Backend) -> Result<Ground, String> {
        match backend {
            Backend::Nccl => {
                let emulated = Emulated::new().map_err(|error| format!("the emulated libraries: {error}"))?;
                let emulated = match std::env::var(OWN_KERNELS) {
                    Ok(algorithm) => emulated.own_kernels(&algorithm),
                    Err(_) => emulated,
                };
                // One for each rank of the largest world.
                Ok(Ground { emulated: Some(emulated.set("DEVICES", crate::program::RANKS)) })
            }
            Backend::Host | Backend::Mpi | Backend::Ucx => Ok(Ground { emulated: None }),
        }
    }

    /// For ranks on this backend.
    #[cfg(not(target_os = "linux"))]
    pub fn new(_backend: Backend) -> Result<Ground, String> {
        Ok(Ground {})
    }

    /// Processes that find it.
    pub fn launch(&self, launch: Launch) -> Launch {
        #[cfg(target_os = "linux")]
        if let Some(emulated) = &self.emulated {
            return emulated.launch(launch).env("PHALANX_BACKEND", Backend::Nccl.name());
        }
        launch
    }
}

/// A rank's report after its communicator failed: the verdict and how long the failing call took. Asks the
/// communicator again in other ways, and drops it: it must go on answering the same, and at once.
pub fn report(comm: Comm, error: &Error, took: Duration) -> Result<Fields, String> {
    let fields = verdict::fields(error).with("took_ms", took.as_millis());
    if error.is_fatal() {
        answers_the_same(&comm, &fields)?;
    }
    let since = Instant::now();
    drop(comm);
    if since.elapsed() > DROP_LIMIT {
        return Err(format!("dropping the failed communicator took {:?}", since.elapsed()));
    }
    Ok(fields)
}

fn answers_the_same(comm: &Comm, first: &Fields) -> Result<(), String> {
    let since = Instant::now();
    let peer = (comm.rank() + 1) % comm.world_size();
    let mut buffer = [1.0f32; 3];
    let mut large = vec![0u8; 100_000];
    let again = [
        ("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum)),
        ("broadcast", comm.broadcast_in_place(&mut large, 0)),
        ("barrier", comm.barrier()),
        ("send", comm.send(&buffer, peer)),
        ("recv", comm.recv(&mut buffer, peer)),
        ("split", comm.split(Some(0), 0).map(drop)),
        ("group", comm.group(|g| g.send(&large, peer))),
        ("sync", comm.sync()),
        (
            "start_all_reduce",
            comm.start_all_reduce(vec![0u8; 9], ReduceOp::Sum).and_then(|r| r.wait()).map(drop),
        ),
    ];
    for (call, result) in again {
        let fields = verdict::expected(result, &format!("{call} after the failure"))?;
        if same(&fields) != same(first) {
            return Err(format!("{call} after the failure answers {fields}, the first verdict was {first}"));
        }
    }
    if since.elapsed() > Duration::from_secs(1) {
        return Err(format!("answering again took {:?}", since.elapsed()));
    }
    Ok(())
}

/// A verdict without what is each rank's own: times, and what missing ranks were last seen doing.
pub fn same(fields: &Fields) -> Fields {
    fields.clone().without(&["took_ms", "text", "last_seen"])
}

/// The verdicts in reports, of which there must be `count` that are all the same.
pub fn one_verdict(reports: &[String], count: usize) -> Result<Fields, String> {
    let verdicts = reports.iter().map(|report| Fields::parse(report).ok_or("not a report"));
    let verdicts: Vec<Fields> = verdicts.collect::<Result<_, _>>()?;
    if verdicts.len() != count {
        return Err(format!("{} reports where {count} are right", verdicts.len()));
    }
    match verdicts.iter().find(|other| same(other) != same(&verdicts[0])) {
        Some(other) => Err(format!("verdicts differ:\n  {}\n  {other}", verdicts[0])),
        None => Ok(verdicts[0].clone()),
    }
}

/// An error unless a field has this value.
pub fn has(fields: &Fields, name: &str, expected: impl std::fmt::Display) -> Result<(), String> {
    let expected = expected.to_string();
    if fields.get(name) == Some(&expected) {
        return Ok(());
    }
    Err(format!("{name} is {:?}, expected {expected:?}, in: {fields}", fields.get(name)))
}

/// An error unless a field contains this text.
pub fn says(fields: &Fields, name: &str, part: &str) -> Result<(), String> {
    if fields.get(name).is_some_and(|text| text.contains(part)) {
        return Ok(());
    }
    Err(format!("{name} does not say {part:?} in: {fields}"))
}

/// An error unless every report's time is within the limit.
pub fn all_within(reports: &[String], limit: Duration) -> Result<(), String> {
    let took = |report: &String| Fields::parse(report).and_then(|fields| fields.number("took_ms"));
    match reports.iter().find(|report| took(report).is_none_or(|ms| u128::from(ms) > limit.as_millis())) {
        Some(slow) => Err(format!("not within {limit:?}: {slow}")),
        None => Ok(()),
    }
}

/// All ranks call the communicator by one name, however they came to it.
pub fn have_one_name(comm: &Comm) -> phalanx::Result<()> {
    let mut hasher = DefaultHasher::new();
    comm.name().hash(&mut hasher);
    let all = comm.all_gather_value(hasher.finish())?;
    assert!(
        all.iter().all(|one| *one == all[0]),
        "rank {} calls it {}, and another otherwise",
        comm.rank(),
        comm.name()
    );
    Ok(())
}
