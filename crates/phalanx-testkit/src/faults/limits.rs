//! Small limits of the operating system: a typed error that names the remedy, and never a signal or a hang.

use super::Case;
use crate::Scenario;

#[cfg(target_os = "linux")]
pub const SCENARIOS: &[Scenario] = linux::SCENARIOS;
#[cfg(not(target_os = "linux"))]
pub const SCENARIOS: &[Scenario] = &[];

#[cfg(not(target_os = "linux"))]
pub fn cases() -> Vec<Case> {
    Vec::new()
}

#[cfg(target_os = "linux")]
pub use linux::cases;

#[cfg(target_os = "linux")]
mod linux {
    use super::*;
    use crate::faults::common::{self, DEADLINE, all_within, has, one_verdict, says};
    use crate::processes::Launch;
    use crate::scenario::Outcome;
    use crate::{Fields, no_threads, verdict};
    use phalanx::{Comm, Error, ReduceOp};
    use rustix::process::{Resource, Rlimit, setrlimit};
    use std::time::{Duration, Instant};

    pub const SCENARIOS: &[Scenario] = &[
        Scenario::process("limits/files_of_processes", |args| {
            limit_files(number(args)? as usize)?;
            report(phalanx::init().and_then(|comm| works(&comm)))
        }),
        Scenario::process("limits/files_of_threads", |args| {
            limit_files(number(args)? as usize)?;
            report(run_threads())
        }),
        Scenario::process("limits/memory_of_threads", |args| {
            limit_memory(number(args)?)?;
            report(run_threads())
        }),
        Scenario::process("limits/threads_of_run", |_| threads_of_run()),
        Scenario::process("limits/memory_of_processes", |args| {
            limit_memory(number(args)?)?;
            report(phalanx::init().and_then(|comm| works(&comm)))
        }),
        Scenario::process("limits/file_size", |args| {
            lower(Resource::Fsize, number(args)?)?;
            report(phalanx::init().and_then(|comm| works(&comm)))
        }),
        Scenario::rank("limits/file_size_of_alloc", |comm, _| file_size_of_alloc(&comm)),
        Scenario::rank("limits/small_alloc", |comm, _| small_alloc(&comm)),
        Scenario::rank("limits/memory_of_requests", |comm, _| memory_of_requests(&comm)),
        Scenario::process("limits/no_threads", |_| no_threads_at_all()),
        Scenario::rank("limits/memory_of_messages", |comm, _| memory_of_messages(comm)),
        Scenario::rank("limits/huge_alloc", |comm, _| huge_alloc(&comm)),
        Scenario::process("limits/huge_alloc_of_threads", |_| {
            let outcomes = phalanx::run(2, |comm| huge_alloc(&comm)).map_err(|error| error.to_string())?;
            outcomes.into_iter().collect()
        }),
    ];

    pub fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        let mut add = |name: &str, run: fn() -> Result<(), String>| {
            cases.push(Case::new(format!("processes/limits/{name}"), run));
        };
        add("files_of_processes", || {
            fails(Launch::new("limits/files_of_processes", 3).arg(1))?;
            (2..12).try_for_each(|files| either(Launch::new("limits/files_of_processes", 3).arg(files)))
        });
        add("files_of_threads", || {
            (0..3).try_for_each(|files| either(Launch::alone("limits/files_of_threads").arg(files)))
        });
        add("memory_of_threads", || {
            fails(Launch::alone("limits/memory_of_threads").arg(1))?;
            [3, 6, 12, 30, 100]
                .iter()
                .try_for_each(|mib| either(Launch::alone("limits/memory_of_threads").arg(mib)))
        });
        add("threads_of_run", || {
            let launch = Launch::alone("limits/threads_of_run").env("RUST_MIN_STACK", &STACK.to_string());
            ok(launch)
        });
        add("memory_of_processes", || {
            fails(Launch::new("limits/memory_of_processes", 3).arg(1))?;
            [3, 6, 12, 30]
                .iter()
                .try_for_each(|mib| either(Launch::new("limits/memory_of_processes", 3).arg(mib)))
        });
        add("file_size", || {
            fails(Launch::new("limits/file_size", 3).arg(4096))?;
            fails(Launch::new("limits/file_size", 3).arg(0))
        });
        add("file_size_of_alloc", || ok(Launch::new("limits/file_size_of_alloc", 2)));
        add("small_alloc", || ok(Launch::new("limits/small_alloc", 2)));
        add("memory_of_requests", || ok(Launch::new("limits/memory_of_requests", 2)));
        add("memory_of_messages", || {
            let reports = Launch::new("limits/memory_of_messages", 2).deadline(DEADLINE).reports()?;
            let verdict = one_verdict(&reports, 2)?;
            has(&verdict, "event", "Refused")?;
            has(&verdict, "rank", 0)?;
            says(&verdict, "text", "has come before its receive: post the receive first")?;
            all_within(&reports, Duration::from_secs(5))
        });
        add("no_threads", || ok(Launch::new("limits/no_threads", 3)));
        add("huge_alloc", || ok(Launch::new("limits/huge_alloc", 2)));
        add("huge_alloc_of_threads", || ok(Launch::alone("limits/huge_alloc_of_threads")));
        for case in cases.iter_mut().filter(|case| case.name.ends_with("/no_threads")) {
            case.ignored = no_threads::cannot_refuse().map(Into::into);
        }
        cases
    }

    fn number(args: &[String]) -> Result<u64, String> {
        args.first().and_then(|arg| arg.parse().ok()).ok_or_else(|| "a number is missing".to_owned())
    }

    /// Lowers both limits, so that the library cannot help itself by raising the soft one.
    fn lower(resource: Resource, limit: u64) -> Result<(), String> {
        let limit = Rlimit { current: Some(limit), maximum: Some(limit) };
        setrlimit(resource, limit).map_err(|error| error.to_string())
    }

    /// Leaves room for so many more open files.
    fn limit_files(more: usize) -> Result<(), String> {
        let listing = std::fs::read_dir("/proc/self/fd").map_err(|error| error.to_string())?;
        let open: Vec<u64> =
            listing.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
        // Whoever started the tests may have left files open under high numbers, so free numbers count,
        // from the lowest. The listing's own is closed again and is one more.
        let free = (0..).filter(|number| !open.contains(number));
        let limit = free.take(more).last().unwrap_or(0);
        lower(Resource::Nofile, limit)
    }

    /// Leaves room for so many more MiB of address space.
    fn limit_memory(more: u64) -> Result<(), String> {
        let status = std::fs::read_to_string("/proc/self/status").map_err(|error| error.to_string())?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
        let now: Option<u64> = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        lower(Resource::As, (now.ok_or("no VmSize")? << 10) + (more << 20))
    }

    fn works(comm: &Comm) -> phalanx::Result<()> {
        let mut sum = [1u8; 3];
        comm.all_reduce_in_place(&mut sum, ReduceOp::Sum)
    }

    fn run_threads() -> phalanx::Result<()> {
        phalanx::run(6, |comm| works(&comm))?.into_iter().collect()
    }

    /// The stack of a rank that is a thread: two do not fit.
    const STACK: u64 = 1 << 30;

    /// The second of two ranks cannot be started: the first, which waits for it, is told that it is gone.
    fn threads_of_run() -> Outcome {
        limit_memory((STACK >> 20) * 3 / 2)?;
        let told = std::sync::Mutex::new(None);
        let since = Instant::now();
        let result = phalanx::run(2, |comm| {
            let outcome = works(&comm).map_err(|error| verdict::fields(&error));
            *told.lock().expect("nobody panics") = Some(outcome);
        });
        let took = since.elapsed();
        let fields = verdict::expected(result, "a run with one thread")?;
        has(&fields, "kind", "system")?;
        says(&fields, "text", "2 threads are needed")?;
        if took > Duration::from_secs(5) {
            return Err(format!("it took {took:?}"));
        }
        match told.into_inner().map_err(|_| "a rank panicked")? {
            Some(Err(told)) => has(&told, "event", "Left")?,
            other => return Err(format!("rank 0 is told {other:?}")),
        }
        Ok(String::new())
    }

    fn report(result: phalanx::Result<()>) -> Outcome {
        Ok(match result {
            Ok(()) => Fields::new().with("kind", "worked").to_string(),
            Err(error) => verdict::fields(&error).to_string(),
        })
    }

    fn reports(launch: Launch) -> Result<Vec<Fields>, String> {
        // Ranks whose peers have failed to join are told after this time.
        let reports = launch.env("PHALANX_TIMEOUT", "4").deadline(DEADLINE).reports()?;
        Ok(reports.iter().map(|report| Fields::parse(report)).collect::<Option<_>>().ok_or("not a report")?)
    }

    /// Every rank gets a typed error, and whoever met the limit says what to do.
    fn fails(launch: Launch) -> Result<(), String> {
        let reports = reports(launch)?;
        for fields in &reports {
            match fields.get("kind") {
                Some("system" | "bootstrap") => {}
                _ => return Err(format!("not the right error: {fields}")),
            }
        }
        let tells = |fields: &Fields| fields.get("text").is_some_and(|text| text.contains("ulimit"));
        if !reports.iter().any(tells) {
            return Err(format!("nobody names a remedy: {reports:?}"));
        }
        Ok(())
    }

    /// It works, or it is a typed error: with a limit that is nearly enough, both are right.
    fn either(launch: Launch) -> Result<(), String> {
        for fields in reports(launch)? {
            match fields.get("kind") {
                Some("worked" | "system" | "bootstrap" | "peer" | "timeout") => {}
                _ => return Err(format!("not the right error: {fields}")),
            }
        }
        Ok(())
    }

    fn ok(launch: Launch) -> Result<(), String> {
        launch.deadline(DEADLINE).reports()?;
        Ok(())
    }

    /// A limit that comes when the communicator is there already: `alloc` meets it, and nothing else is hurt.
    fn file_size_of_alloc(comm: &Comm) -> Outcome {
        works(comm).map_err(|error| error.to_string())?;
        lower(Resource::Fsize, 4096)?;
        let fields = verdict::expected(comm.alloc::<u8>(64 << 20).map(drop), "alloc beyond RLIMIT_FSIZE")?;
        has(&fields, "kind", "system")?;
        has(&fields, "fatal", false)?;
        says(&fields, "text", "ulimit -f")?;
        works(comm).map_err(|error| error.to_string())?;
        // What needs no memory of its own works with any size.
        let mut sum = vec![1u32; 1 << 20];
        comm.all_reduce_in_place(&mut sum, ReduceOp::Sum).map_err(|error| error.to_string())?;
        Ok(String::new())
    }

    /// Where there is too little for another large piece, `alloc` takes as much as was asked for.
    fn small_alloc(comm: &Comm) -> Outcome {
        if comm.rank() == 0 {
            let full = (0..6).map(|piece| comm.alloc::<u8>(1 << 20 << piece));
            let full = full.collect::<phalanx::Result<Vec<_>>>().map_err(|error| error.to_string())?;
            let longest = longest_file().ok_or("the region's file is not among the open ones")?;
            lower(Resource::Fsize, longest + (8 << 20))?;
            let small = comm.alloc::<u8>(4096).map_err(|error| format!("4 KiB of 8 MiB: {error}"))?;
            let fields = verdict::expected(comm.alloc::<u8>(16 << 20).map(drop), "16 MiB of 8")?;
            has(&fields, "kind", "system")?;
            if small.iter().any(|byte| *byte != 0) || full.iter().any(|piece| piece.is_empty()) {
                return Err("memory that is not what was asked for".into());
            }
        }
        works(comm).map_err(|error| error.to_string())?;
        Ok(String::new())
    }

    /// Bytes of the longest of this process's files that have no name.
    fn longest_file() -> Option<u64> {
        let open = std::fs::read_dir("/proc/self/fd").ok()?.filter_map(|entry| Some(entry.ok()?.path()));
        let is_anonymous = |path: &std::path::PathBuf| {
            std::fs::read_link(path).is_ok_and(|file| file.to_string_lossy().contains("memfd:"))
        };
        open.filter(is_anonymous).filter_map(|path| Some(std::fs::metadata(path).ok()?.len())).max()
    }

    /// A request needs a thread the first time: if there is no memory for one, that is an error of the call.
    fn memory_of_requests(comm: &Comm) -> Outcome {
        limit_memory(1)?;
        let fields = verdict::expected(
            comm.start_all_reduce(vec![1u8; 3], ReduceOp::Sum).map(drop),
            "start_all_reduce without memory for a thread",
        )?;
        has(&fields, "kind", "system")?;
        has(&fields, "fatal", false)?;
        works(comm).map_err(|error| error.to_string())?;
        Ok(String::new())
    }

    /// Where no further thread can be started, all works but what needs one, and that says which limit it was.
    fn no_threads_at_all() -> Outcome {
        no_threads::refuse()?;
        let text = |error: Error| error.to_string();
        let comm = phalanx::init().map_err(text)?;
        works(&comm).map_err(text)?;
        let started = comm.start_all_reduce(vec![1u8; 3], ReduceOp::Sum).map(drop);
        let fields = verdict::expected(started, "start_all_reduce without a thread")?;
        has(&fields, "kind", "system")?;
        has(&fields, "fatal", false)?;
        says(&fields, "text", "ulimit -u")?;
        let part = comm.split(Some(0), 0).map_err(text)?.ok_or("no part")?;
        let rest = comm.shrink().map_err(text)?;
        for comm in [&comm, &part, &rest] {
            works(comm).map_err(text)?;
        }
        Ok(String::new())
    }

    /// Rank 0 has no memory to put a message aside that comes before the one it waits for.
    fn memory_of_messages(comm: Comm) -> Outcome {
        let message = vec![1u8; 64 << 20];
        comm.barrier().map_err(|error| error.to_string())?;
        let since = Instant::now();
        let result = if comm.rank() == 0 {
            limit_memory(8)?;
            comm.recv_tagged(&mut [0u8], 1, 2)
        } else {
            comm.send_tagged(&message, 0, 1)
        };
        let error = result.err().ok_or("there was memory")?;
        Ok(common::report(comm, &error, since.elapsed())?.to_string())
    }

    /// More memory than there is address space for.
    fn huge_alloc(comm: &Comm) -> Outcome {
        for len in [1 << 62, 1 << 48, usize::MAX / 2] {
            match comm.alloc::<u8>(len) {
                Err(error @ (Error::System(_) | Error::Usage(_))) if !error.is_fatal() => {}
                other => return Err(format!("alloc of {len} bytes answers {other:?}")),
            }
            works(comm).map_err(|error| error.to_string())?;
        }
        Ok(String::new())
    }
}
