//! The launcher's variables: wrong, missing, contradictory; ranks that never come.

use super::Case;
use super::common::{DEADLINE, has, one_verdict, says};
use crate::processes::Launch;
use crate::scenario::Outcome;
use crate::{Fields, Scenario, verdict};
use phalanx::ReduceOp;
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::process("environment/init", init),
    Scenario::process("environment/grow_alone", |_| {
        let comm = phalanx::init().map_err(|error| error.to_string())?;
        let fields = verdict::expected(comm.grow(1), "growing a world of one")?;
        comm.barrier().map_err(|error| error.to_string())?;
        Ok(fields.to_string())
    }),
    Scenario::process("environment/builder_timeout", |_| {
        let comm = phalanx::Comm::builder().timeout(Duration::from_secs(7)).init();
        let comm = comm.map_err(|error| error.to_string())?;
        Ok(Fields::new().with("timeout_s", comm.timeout().as_secs()).to_string())
    }),
    Scenario::process("environment/die_before_init", |args| {
        // The first argument is the rank that ends before it has joined.
        match std::env::var("PHALANX_RANK") {
            Ok(rank) if rank == args[0] => std::process::exit(0),
            _ => init(args),
        }
    }),
    Scenario::process("environment/late", |args| {
        if std::env::var("PHALANX_RANK").is_ok_and(|rank| rank == args[0]) {
            std::thread::sleep(Duration::from_millis(1500));
        }
        init(args)
    }),
];

/// Joins, does a little, and reports either that or the error.
fn init(_: &[String]) -> Outcome {
    let since = Instant::now();
    let fields = match phalanx::init() {
        Err(error) => verdict::fields(&error),
        Ok(comm) => {
            let mut sum = [comm.rank() as u64];
            comm.all_reduce_in_place(&mut sum, ReduceOp::Sum).map_err(|error| error.to_string())?;
            Fields::new()
                .with("kind", "joined")
                .with("rank", comm.rank())
                .with("world_size", comm.world_size())
                .with("backend", comm.backend())
                .with("sum", sum[0])
                .with("timeout_s", comm.timeout().as_secs())
        }
    };
    Ok(fields.with("took_ms", since.elapsed().as_millis()).to_string())
}

pub fn cases() -> Vec<Case> {
    if !cfg!(target_os = "linux") {
        return Vec::new();
    }
    let mut cases = Vec::new();
    let mut add = |name: &str, run: fn() -> Result<(), String>| {
        cases.push(Case::new(format!("processes/environment/{name}"), run));
    };
    add("no_variables", no_variables);
    add("malformed", malformed);
    add("incomplete", incomplete);
    add("timeout_variable", timeout_variable);
    add("a_world_of_one_cannot_grow", || {
        has(&one(Launch::alone("environment/grow_alone"))?, "kind", "unsupported")
    });
    add("builder_before_variable", || {
        let fields = one(Launch::alone("environment/builder_timeout").env("PHALANX_TIMEOUT", "50"))?;
        has(&fields, "timeout_s", 7)
    });
    add("endless_timeout", || ["1e19", "none"].into_iter().try_for_each(endless_timeout));
    add("duplicate_rank", duplicate_rank);
    add("different_world_sizes", different_world_sizes);
    add("missing_rank", || missing_ranks(&[3]));
    add("missing_rank_0", || missing_ranks(&[0]));
    add("missing_ranks", || missing_ranks(&[1, 2]));
    add("dies_before_init", dies_before_init);
    add("late_rank", late_rank);
    add("too_late", too_late);
    add("torchrun", torchrun);
    add("several_hosts", several_hosts);
    cases
}

/// The fields of one process's report.
fn one(launch: Launch) -> Result<Fields, String> {
    let reports = launch.deadline(DEADLINE).reports()?;
    Ok(Fields::parse(&reports[0]).ok_or("not a report")?)
}

fn no_variables() -> Result<(), String> {
    let fields = one(Launch::alone("environment/init"))?;
    has(&fields, "kind", "joined")?;
    has(&fields, "world_size", 1)?;
    has(&fields, "backend", "solo")?;
    has(&fields, "timeout_s", 300)
}

/// A value that is not what it should be is named, with its variable.
fn malformed() -> Result<(), String> {
    let cases = [
        ("PHALANX_RANK", "abc"),
        ("PHALANX_RANK", ""),
        ("PHALANX_RANK", "-1"),
        ("PHALANX_RANK", "1.0"),
        ("PHALANX_RANK", "2"),
        ("PHALANX_RANK", "99999999999999999999999"),
        ("PHALANX_WORLD_SIZE", "0"),
        ("PHALANX_WORLD_SIZE", "two"),
        ("PHALANX_WORLD_SIZE", "100000"),
        ("PHALANX_LOCAL_RANK", "x"),
        ("PHALANX_LOCAL_WORLD_SIZE", "0"),
        ("PHALANX_TIMEOUT", "soon"),
        ("PHALANX_TIMEOUT", "-5"),
        ("PHALANX_STOPPED_TIMEOUT", "never"),
        ("PHALANX_CORES", "0"),
        ("PHALANX_CORES", "many"),
        ("PHALANX_TRACE_SIGNAL", "KILL"),
        ("PHALANX_BACKEND", "carrier-pigeon"),
    ];
    let problems: Vec<String> = cases.iter().filter_map(|(name, value)| refused(name, value).err()).collect();
    if problems.is_empty() { Ok(()) } else { Err(problems.join("\n")) }
}

/// Starts one of two ranks: it must not even try to meet the other.
fn refused(name: &str, value: &str) -> Result<(), String> {
    let launch = Launch::new("environment/init", 2).without_rank(1).env("PHALANX_TIMEOUT", "3");
    let fields = one(launch.env(name, value)).map_err(|failed| format!("{name}={value:?}: {failed:?}"))?;
    let told = || -> Result<(), String> {
        match fields.get("kind") {
            Some("usage" | "bootstrap" | "unsupported") => {}
            other => return Err(format!("kind is {other:?}")),
        }
        says(&fields, "text", name)?;
        says(&fields, "text", value)?;
        if fields.number("took_ms").is_none_or(|ms| ms > 1000) {
            return Err("it took its time".into());
        }
        Ok(())
    };
    told().map_err(|problem| format!("{name}={value:?}: {problem}: {fields}"))
}

/// Some of the variables but not all: the missing one is named.
fn incomplete() -> Result<(), String> {
    for name in ["PHALANX_RANK", "PHALANX_WORLD_SIZE", "PHALANX_JOB"] {
        let launch = Launch::new("environment/init", 2).without_rank(1).env_of(0, name, None);
        let fields = one(launch).map_err(|failed| format!("without {name}: {failed:?}"))?;
        let problem = |problem: String| format!("without {name}: {problem}");
        if fields.get("kind") == Some("joined") {
            return Err(problem(format!("{fields}")));
        }
        says(&fields, "text", name).map_err(problem)?;
    }
    Ok(())
}

/// `PHALANX_TIMEOUT` is in seconds and fractions of them.
fn timeout_variable() -> Result<(), String> {
    for value in ["1", "0.5"] {
        let launch = Launch::new("environment/init", 2).without_rank(1).env("PHALANX_TIMEOUT", value);
        let fields = one(launch)?;
        has(&fields, "kind", "bootstrap")?;
        if fields.number("took_ms").is_none_or(|ms| !(400..3000).contains(&ms)) {
            return Err(format!("PHALANX_TIMEOUT={value}: {fields}"));
        }
    }
    Ok(())
}

/// A time longer than any clock can say is one that never passes.
fn endless_timeout(value: &str) -> Result<(), String> {
    let launch = Launch::new("environment/init", 3).env("PHALANX_TIMEOUT", value).deadline(DEADLINE);
    for report in launch.reports()? {
        let fields = Fields::parse(&report).ok_or("not a report")?;
        has(&fields, "kind", "joined")?;
        has(&fields, "sum", 3)?;
    }
    Ok(())
}

/// Every rank that was started is told, in time.
fn told(launch: Launch, started: usize, limit: Duration) -> Result<Vec<Fields>, String> {
    let reports = launch.deadline(DEADLINE).reports()?;
    let fields: Option<Vec<Fields>> = reports.iter().map(|report| Fields::parse(report)).collect();
    let fields = fields.filter(|fields| fields.len() == started).ok_or("a rank has no report")?;
    for fields in &fields {
        match fields.get("kind") {
            Some("bootstrap" | "usage") => {}
            _ => return Err(format!("not told: {fields}")),
        }
        if fields.number("took_ms").is_none_or(|ms| u128::from(ms) > limit.as_millis()) {
            return Err(format!("not within {limit:?}: {fields}"));
        }
    }
    Ok(fields)
}

/// Two processes that both think they are rank 1, in a world of three.
fn duplicate_rank() -> Result<(), String> {
    let launch = Launch::new("environment/init", 3).env("PHALANX_TIMEOUT", "3");
    let launch = launch.env_of(2, "PHALANX_RANK", Some("1")).env_of(2, "PHALANX_LOCAL_RANK", Some("1"));
    let all = told(launch, 3, Duration::from_secs(5))?;
    // Somebody saw the duplicate; whoever did not is told that rank 2 is missing.
    if !all.iter().any(|fields| fields.get("text").is_some_and(|text| text.contains("rank 1"))) {
        return Err(format!("nobody names the rank that came twice: {all:?}"));
    }
    Ok(())
}

fn different_world_sizes() -> Result<(), String> {
    let launch = Launch::new("environment/init", 2).env("PHALANX_TIMEOUT", "3");
    let launch = launch.env_of(1, "PHALANX_WORLD_SIZE", Some("3"));
    let launch = launch.env_of(1, "PHALANX_LOCAL_WORLD_SIZE", Some("3"));
    let all = told(launch, 2, Duration::from_secs(5))?;
    for fields in &all {
        says(fields, "text", "2")?;
        says(fields, "text", "3")?;
    }
    Ok(())
}

/// Ranks that are never started: the others name them, all alike, when the time is up.
fn missing_ranks(missing: &[usize]) -> Result<(), String> {
    let launch = Launch::new("environment/init", 4).env("PHALANX_TIMEOUT", "2");
    let launch = missing.iter().fold(launch, |launch, rank| launch.without_rank(*rank));
    let all = told(launch, 4 - missing.len(), Duration::from_secs(4))?;
    for fields in &all {
        has(fields, "kind", "bootstrap")?;
        has(fields, "missing", verdict::list(missing.iter().copied()))?;
        for rank in missing {
            says(fields, "text", &rank.to_string())?;
        }
    }
    Ok(())
}

fn dies_before_init() -> Result<(), String> {
    let launch = Launch::new("environment/die_before_init", 3).arg(1).env("PHALANX_TIMEOUT", "2");
    let ended = launch.deadline(DEADLINE).run()?;
    for rank in ended.iter().filter(|rank| rank.rank != 1) {
        let report = rank.outcome.as_ref().map_err(|problem| format!("rank {}: {problem}", rank.rank))?;
        let fields = Fields::parse(report).ok_or("not a report")?;
        has(&fields, "kind", "bootstrap")?;
        has(&fields, "missing", 1)?;
    }
    Ok(())
}

/// Whoever comes late but in time is waited for.
fn late_rank() -> Result<(), String> {
    for late in [0, 1] {
        let reports = Launch::new("environment/late", 3).arg(late).deadline(DEADLINE).reports()?;
        for (rank, report) in reports.iter().enumerate() {
            let fields = Fields::parse(report).ok_or("not a report")?;
            has(&fields, "kind", "joined")?;
            has(&fields, "rank", rank)?;
            has(&fields, "sum", 3)?;
        }
    }
    Ok(())
}

/// A rank that comes when the job has long begun, or is of an earlier attempt: it is told that nobody waits
/// for it, and those who work are not disturbed.
fn too_late() -> Result<(), String> {
    let job = format!("too-late-{}", std::process::id());
    let mut working =
        Launch::new("gone/short_stop", 4).env("PHALANX_JOB", &job).deadline(DEADLINE).start()?;
    for rank in 0..4 {
        working.await_phase(rank, "working")?;
    }
    let late = Launch::new("environment/init", 4).env("PHALANX_JOB", &job).env("PHALANX_TIMEOUT", "0.5");
    let late = (0..3).fold(late, |late, rank| late.without_rank(rank));
    for fields in told(late, 1, Duration::from_secs(2))? {
        has(&fields, "kind", "bootstrap")?;
        has(&fields, "missing", 0)?;
    }
    let ended = working.finish();
    match ended.iter().find(|rank| rank.outcome.is_err()) {
        None => Ok(()),
        Some(disturbed) => Err(format!("{disturbed:?}")),
    }
}

/// torchrun's variables instead of phalanx's own.
fn as_torchrun(launch: Launch, ranks: usize, local: usize) -> Launch {
    let names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "JOB"];
    (0..ranks).fold(launch, |launch, rank| {
        let launch =
            names.iter().fold(launch, |launch, name| launch.env_of(rank, &format!("PHALANX_{name}"), None));
        launch
            .env_of(rank, "RANK", Some(&rank.to_string()))
            .env_of(rank, "WORLD_SIZE", Some(&ranks.to_string()))
            .env_of(rank, "LOCAL_RANK", Some(&(rank % local).to_string()))
            .env_of(rank, "LOCAL_WORLD_SIZE", Some(&local.to_string()))
            .env_of(rank, "GROUP_RANK", Some(&(rank / local).to_string()))
            .env_of(rank, "MASTER_ADDR", Some("127.0.0.1"))
            // Never opened by ranks of one host; part of what tells jobs apart.
            .env_of(rank, "MASTER_PORT", Some(&(20_000 + std::process::id() % 40_000).to_string()))
            .env_of(rank, "TORCHELASTIC_RUN_ID", Some("none"))
    })
}

fn torchrun() -> Result<(), String> {
    let launch = as_torchrun(Launch::new("environment/init", 3), 3, 3);
    let reports = launch.deadline(DEADLINE).reports()?;
    for (rank, report) in reports.iter().enumerate() {
        let fields = Fields::parse(report).ok_or("not a report")?;
        has(&fields, "kind", "joined")?;
        has(&fields, "rank", rank)?;
        has(&fields, "sum", 3)?;
    }
    Ok(())
}

/// Ranks of another host cannot be reached through memory: that is said at once, not after a timeout.
fn several_hosts() -> Result<(), String> {
    let launch = as_torchrun(Launch::new("environment/init", 4), 4, 2);
    let launch = launch.without_rank(2).without_rank(3).deadline(DEADLINE);
    let reports = launch.reports()?;
    let verdict = one_verdict(&reports, 2)?;
    if verdict.get("kind") == Some("joined") || verdict.number("took_ms").is_none_or(|ms| ms > 1000) {
        return Err(format!("{verdict}"));
    }
    Ok(())
}
