//! Ranks are killed while they train, and the others go on; new ones come.

use libtest_mimic::Trial;
use phalanx::{Comm, ReduceOp};
use phalanx_testkit::fault::{self, Fault};
use phalanx_testkit::processes::{Launch, describe};
use phalanx_testkit::{Outcome, Scenario};
use phalanx_train::Result;
use phalanx_train::elastic::{Model, Recovery, Trainer};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("elastic/shrink", |comm, args| train(comm, Recovery::Shrink, args)),
    Scenario::process("elastic/replacement", |args| {
        // The members first, then those that join them.
        let member = std::env::var("PHALANX_RANK")
            .is_ok_and(|rank| rank.parse::<usize>().is_ok_and(|rank| rank < RANKS));
        let comm = if member { phalanx::init() } else { phalanx::join() };
        train(comm.map_err(|error| error.to_string())?, Recovery::Rebuild, args)
    }),
];

const RANKS: usize = 3;
const STEPS: u64 = 30;

/// Adds (step + 1) × 78 in each step, however many ranks there are.
struct Adding {
    sums: Vec<u64>,
    /// The step in which this process is killed, and the operation before which.
    killed: Option<(u64, usize)>,
}

impl Model for Adding {
    fn step(&mut self, comm: &Comm, step: u64) -> Result<()> {
        for (half, numbers) in [1..=6u64, 7..=12].into_iter().enumerate() {
            // In the second half, the others fail with half a step made.
            if self.killed == Some((step, half)) {
                let _ = fault::inject_here(Fault::Kill);
            }
            let own = numbers.filter(|number| *number as usize % comm.world_size() == comm.rank());
            let mut sum = vec![own.sum::<u64>(); self.sums.len()];
            comm.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
            self.sums.iter_mut().zip(sum).for_each(|(total, sum)| *total += (step + 1) * sum);
        }
        Ok(())
    }

    fn save(&self, state: &mut Vec<u8>) -> Result<()> {
        state.extend(self.sums.iter().flat_map(|sum| sum.to_le_bytes()));
        Ok(())
    }

    fn load(&mut self, state: &[u8]) -> Result<()> {
        let (sums, _) = state.as_chunks::<8>();
        self.sums = sums.iter().map(|sum| u64::from_le_bytes(*sum)).collect();
        Ok(())
    }
}

/// Arguments: for each process that is killed, its number, the step, and the operation before which.
fn train(comm: Comm, recovery: Recovery, args: &[String]) -> Outcome {
    let number = std::env::var("PHALANX_RANK").unwrap_or_default();
    let killed = args.chunks(3).find(|of| of[0] == number);
    let killed = killed.and_then(|of| Some((of[1].parse().ok()?, of[2].parse().ok()?)));
    let mut training = Adding { sums: vec![0; 1000], killed };
    let outcome =
        Trainer::new(recovery).run(comm, &mut training, STEPS).map_err(|error| error.to_string())?;
    let expected = (1..=STEPS).sum::<u64>() * 78;
    if training.sums.iter().any(|sum| *sum != expected) {
        return Err(format!("{} is not {expected}", training.sums[0]));
    }
    Ok(outcome.comm.world_size().to_string())
}

/// Kills processes; all others end with the right sums, and with this many ranks.
fn lose(launch: Launch, killed: &[(usize, u64, usize)], ranks: usize) -> std::result::Result<(), String> {
    let launch =
        killed.iter().fold(launch, |launch, (process, step, after)| launch.arg(process).arg(step).arg(after));
    let ended = launch.run()?;
    let well = ended.iter().all(|rank| match &rank.outcome {
        Ok(ended_with) => *ended_with == ranks.to_string(),
        Err(_) => killed.iter().any(|(process, ..)| *process == rank.rank),
    });
    let lost = ended.iter().filter(|rank| rank.outcome.is_err()).count();
    if well && lost == killed.len() { Ok(()) } else { Err(describe(&ended)) }
}

/// Three members, and processes that join.
fn with_joiners(joiners: usize) -> Launch {
    let members = RANKS.to_string();
    (0..RANKS).fold(Launch::new("elastic/replacement", RANKS + joiners), |launch, rank| {
        let launch = launch.env_of(rank, "PHALANX_WORLD_SIZE", Some(&members));
        launch.env_of(rank, "PHALANX_LOCAL_WORLD_SIZE", Some(&members))
    })
}

pub fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for victim in [0, 1] {
        for (operation, when) in [(0, "before"), (1, "within")] {
            let name = format!("elastic/rank_{victim}_is_killed_{when}_a_step_and_the_others_go_on");
            trials.push(Trial::test(name, move || {
                Ok(lose(Launch::new("elastic/shrink", RANKS), &[(victim, 7, operation)], RANKS - 1)?)
            }));
        }
        trials.push(Trial::test(
            format!("elastic/rank_{victim}_is_killed_and_replaced_with_the_others_state"),
            move || Ok(lose(with_joiners(1), &[(victim, 7, 1)], RANKS)?),
        ));
    }
    trials.push(Trial::test("elastic/two_of_four_are_killed_one_after_the_other", || {
        Ok(lose(Launch::new("elastic/shrink", 4), &[(0, 7, 1), (2, 12, 0)], 2)?)
    }));
    trials
}
