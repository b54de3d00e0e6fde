//! Faults of their own kind: fork, two aborts at once, a full /dev/shm, no locked memory, memory that is
//! refused in the middle of an operation, a peer that is stopped for longer than it may be.

use super::Case;

#[cfg(target_os = "linux")]
pub use linux::{FORK, SCENARIOS, cases, nccl_cases};

#[cfg(not(target_os = "linux"))]
pub const SCENARIOS: &[crate::Scenario] = &[];
/// There is no fork here.
#[cfg(not(target_os = "linux"))]
pub const FORK: crate::Scenario = crate::Scenario::rank("special/fork", |_, _| Err("for Linux".into()));

#[cfg(not(target_os = "linux"))]
pub fn cases() -> Vec<Case> {
    Vec::new()
}

#[cfg(not(target_os = "linux"))]
pub fn nccl_cases() -> Vec<Case> {
    Vec::new()
}

#[cfg(target_os = "linux")]
mod linux {
    use super::Case;
    use crate::fault::Fault;
    use crate::faults::Backend;
    use crate::faults::common::{DEADLINE, Ground, all_within, has, one_verdict, report, says};
    use crate::processes::{Ended, Launch, World, describe, phase};
    use crate::random::Random;
    use crate::scenario::Outcome;
    use crate::{Fields, Scenario, full_disk, threads, verdict};
    use phalanx::{BackendKind, Comm, Error, ReduceOp};
    use rustix::process::{Resource, Rlimit};
    use std::time::{Duration, Instant};

    /// A rank's process is copied in the middle of everything; on GPUs, too.
    pub const FORK: Scenario = Scenario::rank("special/fork", |comm, _| fork(&comm));

    pub const SCENARIOS: &[Scenario] = &[
        FORK,
        Scenario::rank("special/two_aborts", two_aborts),
        Scenario::process("special/two_aborts_of_threads", |args| {
            let outcomes = phalanx::run(4, |comm| two_aborts(comm, args)).map_err(text)?;
            outcomes.into_iter().collect::<Result<Vec<_>, _>>().map(|reports| reports.concat())
        }),
        Scenario::process("special/absent", |_| absent()),
        Scenario::process("special/full_shm", |_| full_shm()),
        Scenario::process("special/no_locked_memory", |_| {
            lower(Resource::Memlock, 0)?;
            let comm = phalanx::init().map_err(text)?;
            works(&comm)?;
            Ok(String::new())
        }),
        Scenario::rank("special/refused", |comm, _| refused(comm)),
        Scenario::rank("special/stopped", |comm, _| stopped(comm)),
        Scenario::rank("special/held_up", |comm, _| held_up(&comm)),
        Scenario::rank("special/beside", |comm, _| beside_a_late_one(&comm)),
        Scenario::rank("special/last_messages", |comm, args| leave_messages(&comm, &args[0])),
        Scenario::rank("special/abort_at_once", |comm, _| abort_at_once(&comm)),
        Scenario::rank("special/only_messages", |comm, _| only_messages(comm)),
        Scenario::rank("special/chain", |comm, args| chain(&comm, args[0] == "elsewhere")),
    ];

    pub fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        cases.push(Case::new("threads/fork", || on_threads("special/fork", 3)));
        for (name, scenario) in [
            ("processes/fork", "special/fork"),
            ("processes/limits/no_locked_memory", "special/no_locked_memory"),
        ] {
            cases.push(Case::new(name, || Launch::new(scenario, 3).deadline(DEADLINE).reports().map(drop)));
        }
        let full = || Launch::new("special/full_shm", 2).deadline(DEADLINE).reports().map(drop);
        cases.push(Case::new("processes/limits/full_shm", full).ignored(full_disk::cannot_mount()));
        cases.extend(two_aborts_cases(Backend::Host));
        cases.push(Case::new("processes/limits/memory_inside_an_operation", expect_refused));
        cases.push(Case::new("processes/stopped/for_longer_than_allowed", expect_stopped));
        let for_a_while = || expect_waited_for(Some("60"), [Fault::Stop, Fault::Continue], "is stopped");
        cases.push(Case::new("processes/stopped/for_a_while", for_a_while));
        let debugged = || expect_waited_for(None, [Fault::Hold, Fault::Release], "is held by a debugger");
        cases.push(Case::new("processes/stopped/by_a_debugger", debugged));
        cases.push(Case::new("processes/stopped/all_together", || expect_held_up(Duration::ZERO)));
        // The others see it, and are then stopped themselves.
        let one_first = || expect_held_up(Duration::from_millis(650));
        cases.push(Case::new("processes/stopped/one_and_then_all", one_first));
        cases.push(Case::new("processes/stopped/beside_one_that_is_late", || {
            stopped_beside_a_late_one(Launch::new("special/beside", 3).deadline(DEADLINE).start()?)
        }));
        for how in ["leave", "panic"] {
            cases.push(Case::new(format!("processes/last_messages/{how}"), move || last_messages(how)));
        }
        cases.push(Case::new("processes/abort_at_once", || {
            Launch::new("special/abort_at_once", 4).deadline(DEADLINE).reports().map(drop)
        }));
        cases.push(Case::new("processes/only_messages", expect_only_messages));
        for place in ["here", "elsewhere"] {
            cases.push(Case::new(format!("processes/chain/{place}"), move || {
                Launch::new("special/chain", 3).arg(place).deadline(DEADLINE).reports().map(drop)
            }));
        }
        cases
    }

    /// Those that are about any backend, on the emulated NCCL.
    pub fn nccl_cases() -> Vec<Case> {
        let absent = Case::new("processes/absent", || {
            let launch = Launch::new("special/absent", 3).without_rank(2).deadline(DEADLINE);
            Ground::new(Backend::Nccl)?.launch(launch).reports().map(drop)
        });
        two_aborts_cases(Backend::Nccl).into_iter().chain([absent]).collect()
    }

    fn two_aborts_cases(backend: Backend) -> [Case; 2] {
        [
            ("processes/two_aborts", Launch::new("special/two_aborts", 4)),
            ("threads/two_aborts", Launch::alone("special/two_aborts_of_threads")),
        ]
        .map(|(name, launch)| {
            Case::seeded(name, move |random| {
                let launch = launch.clone().arg(random.next_u64()).deadline(DEADLINE);
                Ground::new(backend)?.launch(launch).reports().map(drop)
            })
        })
    }

    /// A rank that is never started is named when the others have waited for it.
    fn absent() -> Outcome {
        let timeout = Duration::from_secs(1);
        let since = Instant::now();
        let result = Comm::builder().timeout(timeout).init();
        let fields = verdict::expected(result, "the meeting without a rank")?;
        has(&fields, "missing", 2)?;
        let took = since.elapsed();
        if took > timeout + Duration::from_secs(1) {
            Err(format!("it took {took:?}"))
        } else {
            Ok(String::new())
        }
    }

    fn text(error: Error) -> String {
        error.to_string()
    }

    fn on_threads(name: &str, ranks: usize) -> Result<(), String> {
        let scenario = SCENARIOS.iter().find(|scenario| scenario.name == name).ok_or("no such scenario")?;
        let outcomes = threads::run_scenario(scenario, ranks, &[], DEADLINE)?;
        outcomes.into_iter().collect::<Result<Vec<_>, _>>().map(drop)
    }

    fn works(comm: &Comm) -> Result<(), String> {
        let mut sum = vec![1u32; 50_000];
        comm.all_reduce_in_place(&mut sum, ReduceOp::Sum).map_err(text)?;
        let right = sum.iter().all(|sum| *sum == comm.world_size() as u32);
        if right { Ok(()) } else { Err("a wrong sum".into()) }
    }

    fn lower(resource: Resource, limit: u64) -> Result<(), String> {
        let limit = Rlimit { current: Some(limit), maximum: Some(limit) };
        rustix::process::setrlimit(resource, limit).map_err(|error| error.to_string())
    }

    // --- fork ---------------------------------------------------------------------------------------------

    /// A copy of the process cannot use the communicator, and what it drops does no harm.
    fn fork(comm: &Comm) -> Outcome {
        works(comm)?;
        // It has threads, which the copy has not.
        comm.start_all_reduce(vec![1u8], ReduceOp::Sum).and_then(|request| request.wait()).map_err(text)?;
        let next = (comm.rank() + 1) % comm.world_size();
        let previous = (comm.rank() + comm.world_size() - 1) % comm.world_size();
        let request = comm.start_recv(vec![0u8], previous).map_err(text)?;
        comm.send(&[7u8], next).map_err(text)?;
        request.wait().map_err(text)?;
        let buffer = comm.alloc::<u32>(100_000).map_err(text)?;
        let mut window = comm.nccl().map(|nccl| nccl.alloc::<u32>(1000)).transpose().map_err(text)?;
        // On GPUs messages come behind collectives that were started before.
        let is_held = comm.backend() == BackendKind::Host;
        if is_held && comm.rank() > 0 {
            comm.recv(&mut [0u8], 0).map_err(text)?;
        }
        let started = comm.start_all_reduce(vec![1u8], ReduceOp::Sum).map_err(text)?;
        if comm.rank() == 0 {
            // SAFETY: the child makes a few calls of the library, which take no lock in a copy that another
            // thread may hold, and ends.
            match unsafe { libc::fork() } {
                -1 => return Err(std::io::Error::last_os_error().to_string()),
                0 => {
                    let refused = matches!(started.wait(), Err(Error::Unsupported(_)))
                        && matches!(comm.barrier(), Err(Error::Unsupported(_)))
                        && matches!(comm.send(&[1], 1), Err(Error::Unsupported(_)))
                        && comm.shrink().is_err();
                    // The copies of the communicator and its memory go, as at the end of a program.
                    // SAFETY: `comm` is not used again: the child ends here.
                    drop(unsafe { std::ptr::read(comm) });
                    drop((buffer, window));
                    // SAFETY: always sound.
                    unsafe { libc::_exit(if refused { 0 } else { 9 }) };
                }
                child => {
                    let mut status = 0;
                    // SAFETY: the child is this process's, and the status is written.
                    unsafe { libc::waitpid(child, &mut status, 0) };
                    if status != 0 {
                        return Err(format!("the child ends with status {status:#x}"));
                    }
                }
            }
            // The others come to the collective only now.
            for rank in 1..comm.world_size() {
                if is_held {
                    comm.send(&[1u8], rank).map_err(text)?;
                }
            }
        }
        let sum = started.wait().map_err(text)?;
        if sum != [comm.world_size() as u8] {
            return Err(format!("{sum:?} of a collective that was under way"));
        }
        let mut buffer = buffer;
        for _ in 0..3 {
            works(comm)?;
            if let Some(window) = &mut window {
                comm.all_reduce_in_place(window, ReduceOp::Sum).map_err(text)?;
            }
            buffer.fill(1);
            comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).map_err(text)?;
            if buffer.iter().any(|sum| *sum != comm.world_size() as u32) {
                return Err("a wrong sum after fork".into());
            }
        }
        Ok(String::new())
    }

    // --- two aborts ---------------------------------------------------------------------------------------

    /// Two communicators of the same ranks are aborted by two ranks at about the same time.
    fn two_aborts(comm: Comm, args: &[String]) -> Outcome {
        let rank = comm.rank();
        let seed: u64 = args[0].parse().map_err(|_| "no seed")?;
        let mut delays = Random::new(seed.wrapping_add(rank as u64));
        let parts: Result<Vec<Comm>, String> =
            (0..2).map(|_| comm.split(Some(0), 0).map_err(text)?.ok_or("no part".into())).collect();
        let parts = parts?;
        works(&comm)?;
        let rounds = delays.below(20);
        for (aborter, part) in parts.into_iter().enumerate() {
            for round in 0.. {
                if rank == aborter && round >= rounds {
                    std::thread::sleep(Duration::from_micros(delays.below(300) as u64));
                    part.abort();
                    break;
                }
                let since = Instant::now();
                let mut buffer = [1u8; 100];
                match part.all_reduce_in_place(&mut buffer, ReduceOp::Max) {
                    Ok(()) => {}
                    Err(Error::Aborted { rank }) if rank == aborter => break,
                    Err(error) => return Err(format!("part {aborter}: {error}")),
                }
                if since.elapsed() > Duration::from_secs(2) {
                    return Err(format!("part {aborter} took {:?}", since.elapsed()));
                }
            }
        }
        // The communicator that they are parts of has nothing to do with it.
        works(&comm)?;
        Ok(String::new())
    }

    // --- limits -------------------------------------------------------------------------------------------

    /// With a /dev/shm of its own that is full.
    fn full_shm() -> Outcome {
        full_disk::mount_here()?;
        let comm = phalanx::init().map_err(text)?;
        works(&comm)?;
        let mut shared = comm.alloc::<f32>(1 << 20).map_err(text)?;
        comm.all_reduce_in_place(&mut shared, ReduceOp::Sum).map_err(text)?;
        Ok(String::new())
    }

    /// Rank 0 has no address space left to look into its peers' memory.
    fn refused(comm: Comm) -> Outcome {
        works(&comm)?;
        let mut small = comm.alloc::<u8>(1).map_err(text)?;
        let mut large =
            if comm.rank() == 0 { Vec::new() } else { vec![comm.alloc::<f32>(16 << 20).map_err(text)?] };
        let mut own = if comm.rank() == 0 { vec![1f32; 16 << 20] } else { Vec::new() };
        small[0] = 1;
        // So that nobody waits for memory that is being cleared.
        comm.barrier().map_err(text)?;
        if comm.rank() == 0 {
            let status = std::fs::read_to_string("/proc/self/status").map_err(|error| error.to_string())?;
            let line = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
            let now: Option<u64> = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
            lower(Resource::As, (now.ok_or("no VmSize")? << 10) + (8 << 20))?;
        }
        let since = Instant::now();
        let buffer: &mut [f32] = if comm.rank() == 0 { &mut own } else { &mut large[0] };
        match comm.broadcast_in_place(buffer, 1) {
            Ok(()) => Err("there was memory".into()),
            Err(error) => {
                let took = since.elapsed();
                // The others go on without it.
                match comm.shrink() {
                    Err(Error::LeftBehind { .. }) if comm.rank() == 0 => {}
                    Ok(rest) if comm.rank() > 0 && rest.world_size() == 2 => works(&rest)?,
                    other => return Err(format!("shrink answers {other:?}")),
                }
                Ok(report(comm, &error, took)?.to_string())
            }
        }
    }

    fn expect_refused() -> Result<(), String> {
        let reports = Launch::new("special/refused", 3).deadline(DEADLINE).reports()?;
        let verdict = one_verdict(&reports, 3)?;
        has(&verdict, "kind", "peer")?;
        has(&verdict, "event", "Refused")?;
        has(&verdict, "rank", 0)?;
        says(&verdict, "operation", "broadcast")?;
        all_within(&reports, Duration::from_secs(2))
    }

    // --- a rank that is stopped ---------------------------------------------------------------------------

    /// Works until that fails, or until all have agreed to end.
    fn stopped(comm: Comm) -> Outcome {
        // What it warns of is a part of what is expected.
        tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
        comm.set_timeout(Duration::from_secs(20));
        phase("working");
        let began = Instant::now();
        loop {
            let since = Instant::now();
            let mut going = [u8::from(began.elapsed() < Duration::from_secs(3))];
            match comm.all_reduce_in_place(&mut going, ReduceOp::Min) {
                Ok(()) if going == [0] => return Ok(Fields::new().with("kind", "worked").to_string()),
                Ok(()) => {}
                Err(error) => {
                    let fields = report(comm, &error, since.elapsed())?;
                    phase("failed");
                    return Ok(fields.to_string());
                }
            }
        }
    }

    /// Three ranks at work.
    fn working(limit: Option<&str>) -> Result<World, String> {
        let launch = Launch::new("special/stopped", 3).deadline(DEADLINE);
        let launch =
            limit.into_iter().fold(launch, |launch, limit| launch.env("PHALANX_STOPPED_TIMEOUT", limit));
        let mut world = launch.start()?;
        (0..3).try_for_each(|rank| world.await_phase(rank, "working"))?;
        Ok(world)
    }

    fn reports(ended: &[Ended]) -> Result<Vec<String>, String> {
        let reports: Result<Vec<String>, String> = ended.iter().map(|rank| rank.outcome.clone()).collect();
        reports.map_err(|_| describe(ended))
    }

    /// A peer that is stopped is at fault, unless somebody says that it may be.
    fn expect_stopped() -> Result<(), String> {
        let mut world = working(None)?;
        world.inject(1, Fault::Stop)?;
        world.await_phase(0, "failed")?;
        world.await_phase(2, "failed")?;
        world.inject(1, Fault::Continue)?;
        let reports = reports(&world.finish())?;
        let verdict = one_verdict(&reports, 3)?;
        has(&verdict, "kind", "peer")?;
        has(&verdict, "event", "Stopped")?;
        has(&verdict, "rank", 1)?;
        all_within(&[reports[0].clone(), reports[2].clone()], Duration::from_millis(2500))
    }

    /// A peer that may be stopped, or that a debugger holds, is waited for; a warning says who it is.
    fn expect_waited_for(limit: Option<&str>, [stop, go_on]: [Fault; 2], how: &str) -> Result<(), String> {
        let mut world = working(limit)?;
        world.inject(1, stop)?;
        // Within two seconds it is named, and the rest is for a machine with much else to do.
        std::thread::sleep(Duration::from_millis(2400));
        world.inject(1, go_on)?;
        let ended = world.finish();
        has(&one_verdict(&reports(&ended)?, 3)?, "kind", "worked")?;
        let warned = |output: &str| output.contains("rank 1, process") && output.contains(how);
        match ended.iter().find(|rank| rank.rank != 1 && !warned(&rank.output)) {
            None => Ok(()),
            Some(rank) => {
                Err(format!("rank {} does not say that rank 1 {how}:{}", rank.rank, describe(&ended)))
            }
        }
    }

    /// Everybody waits for rank 0 most of the time.
    fn held_up(comm: &Comm) -> Outcome {
        comm.set_timeout(HELD_UP - Duration::from_secs(1));
        phase("working");
        let began = Instant::now();
        loop {
            if comm.rank() == 0 {
                std::thread::sleep(Duration::from_millis(300));
            }
            let mut going = [u8::from(began.elapsed() < HELD_UP)];
            comm.all_reduce_in_place(&mut going, ReduceOp::Min).map_err(text)?;
            if going == [0] {
                return Ok(String::new());
            }
        }
    }

    /// How long a whole job is stopped: for longer than its deadline.
    const HELD_UP: Duration = Duration::from_secs(3);

    /// A job that is stopped as a whole goes on, whoever does so first, and though rank 0 was stopped so much earlier.
    fn expect_held_up(earlier: Duration) -> Result<(), String> {
        let mut world = Launch::new("special/held_up", 3).deadline(DEADLINE).start()?;
        (0..3).try_for_each(|rank| world.await_phase(rank, "working"))?;
        world.inject(0, Fault::Stop)?;
        std::thread::sleep(earlier);
        (1..3).try_for_each(|rank| world.inject(rank, Fault::Stop))?;
        std::thread::sleep(HELD_UP);
        for rank in [1, 2, 0] {
            world.inject(rank, Fault::Continue)?;
            std::thread::sleep(Duration::from_millis(if rank == 2 && !earlier.is_zero() { 400 } else { 50 }));
        }
        let ended = world.finish();
        if ended.iter().all(|rank| rank.outcome.is_ok()) { Ok(()) } else { Err(describe(&ended)) }
    }

    /// Rank 1 is stopped and rank 2 late: the one that is stopped is at fault.
    fn beside_a_late_one(comm: &Comm) -> Outcome {
        const TIMEOUT: Duration = Duration::from_millis(600);
        works(comm)?;
        match comm.rank() {
            1 => crate::fault::inject_here(Fault::Stop).map_err(|error| error.to_string())?,
            2 => std::thread::sleep(2 * TIMEOUT),
            _ => {}
        }
        let fields = verdict::expected(comm.within(TIMEOUT).barrier(), "barrier without two")?;
        has(&fields, "kind", "timeout")?;
        has(&fields, "missing", 1)?;
        phase("failed");
        Ok(String::new())
    }

    fn stopped_beside_a_late_one(mut world: World) -> Result<(), String> {
        world.await_phase(0, "failed")?;
        world.inject(1, Fault::Continue)?;
        let ended = world.finish();
        if ended.iter().all(|rank| rank.outcome.is_ok()) { Ok(()) } else { Err(describe(&ended)) }
    }

    /// A rank aborts while the others wait, and look whether it lives every 50 ms only: they are told at once. The median of several: a
    /// machine with much else to do may be late now and then.
    fn abort_at_once(comm: &Comm) -> Outcome {
        const TRIES: usize = 15;
        const WHEN: Duration = Duration::from_millis(160);
        const AT_ONCE: Duration = Duration::from_millis(12);
        let mut took = Vec::new();
        for _ in 0..TRIES {
            let part = comm.split(Some(0), 0).map_err(text)?.ok_or("no part")?;
            comm.barrier().map_err(text)?;
            let since = Instant::now();
            if comm.rank() == 1 {
                std::thread::sleep(WHEN);
                part.abort();
                continue;
            }
            match part.barrier() {
                Err(Error::Aborted { rank: 1 }) => took.push(since.elapsed().saturating_sub(WHEN)),
                other => return Err(format!("{other:?}")),
            }
        }
        took.sort();
        if took.get(TRIES / 2).is_some_and(|median| *median > AT_ONCE) {
            return Err(format!("not within {AT_ONCE:?}: {took:?}"));
        }
        Ok(String::new())
    }

    // --- messages -----------------------------------------------------------------------------------------

    /// What a rank has sent before it goes still arrives, and no more.
    fn leave_messages(comm: &Comm, how: &str) -> Outcome {
        const LONG: usize = 1000;
        if comm.rank() == 1 {
            for message in 0..3u8 {
                comm.send(&[message], 0).map_err(text)?;
            }
            comm.send(&vec![7u32; LONG], 0).map_err(text)?;
            return if how == "panic" { panic!("this rank was told to panic") } else { Ok(String::new()) };
        }
        // It is gone by then.
        std::thread::sleep(Duration::from_millis(500));
        for message in 0..3u8 {
            let mut received = [9];
            comm.recv(&mut received, 1).map_err(text)?;
            if received != [message] {
                return Err(format!("{received:?} in the place of {message}"));
            }
        }
        let mut received = vec![0u32; LONG];
        comm.recv(&mut received, 1).map_err(text)?;
        if received.iter().any(|element| *element != 7) {
            return Err("another message".into());
        }
        let fields = verdict::expected(comm.recv(&mut [0u8], 1), "a message that is not sent")?;
        has(&fields, "event", if how == "panic" { "Panicked" } else { "Left" })?;
        Ok(String::new())
    }

    fn last_messages(how: &str) -> Result<(), String> {
        let ended = Launch::new("special/last_messages", 2).arg(how).deadline(DEADLINE).run()?;
        if ended[0].outcome.is_ok() { Ok(()) } else { Err(describe(&ended)) }
    }

    /// Rank 1 has only exchanged messages, and then sends no more: an error says what its last was.
    fn only_messages(comm: Comm) -> Outcome {
        comm.set_timeout(Duration::from_millis(400));
        if comm.rank() == 1 {
            comm.recv(&mut [0u16; 7], 0).map_err(text)?;
            std::thread::sleep(Duration::from_millis(900));
            return Ok(String::new());
        }
        comm.send(&[1u16; 7], 1).map_err(text)?;
        let fields: Fields = verdict::expected(comm.recv(&mut [0u16; 9], 1), "a message that is not sent")?;
        has(&fields, "missing", 1)?;
        says(&fields, "last_seen", "its last message is recv(u16 × 7, from rank 0)")?;
        Ok(String::new())
    }

    /// Rank 0 waits for rank 1, and rank 1, perhaps in another communicator, for rank 2, which is late: rank 2 is named.
    fn chain(comm: &Comm, elsewhere: bool) -> Outcome {
        let rank = comm.rank();
        let part = comm.split((rank > 0).then_some(0), 0).map_err(text)?;
        if rank == 0 {
            let error = comm.within(Duration::from_millis(400)).recv(&mut [0u8], 1);
            let fields = verdict::expected(error, "a message from a rank that waits itself")?;
            has(&fields, "kind", "timeout")?;
            has(&fields, "missing", 2)?;
            return Ok(String::new());
        }
        // The other of the two.
        let peer = 3 - rank;
        let (comm, peer) = if elsewhere { (part.as_ref().ok_or("no part")?, peer - 1) } else { (comm, peer) };
        if rank == 2 {
            std::thread::sleep(Duration::from_millis(1000));
        }
        let outcome = if rank == 1 { comm.recv(&mut [0u8], peer) } else { comm.send(&[1u8], peer) };
        match outcome {
            Ok(()) if elsewhere => Ok(String::new()),
            Err(Error::Timeout(error)) if !elsewhere && error.missing[0].rank == 2 => Ok(String::new()),
            other => Err(format!("rank {rank}: {other:?}")),
        }
    }

    fn expect_only_messages() -> Result<(), String> {
        Launch::new("special/only_messages", 2).deadline(DEADLINE).reports().map(drop)
    }
}
