//! Training that survives the loss of ranks. Processes that are killed are tests of the program `phalanx` (`phalanx-cli/tests/failures`).

use phalanx::{Comm, ReduceOp};
use phalanx_train::Error;
use phalanx_train::elastic::{Model, Recovery, Trainer};

const SAMPLES: usize = 12;

/// Adds up the numbers of all samples, whichever rank has them; rank `lost.1` panics, or fails, in step `lost.0`.
struct Sum {
    sum: u64,
    made: u64,
    fault: Option<fn()>,
    fault_at: u64,
    /// Whether the fault comes after the state was changed by half.
    is_late: bool,
}

impl Model for Sum {
    fn step(&mut self, comm: &Comm, step: u64) -> phalanx_train::Result<()> {
        let own = (0..SAMPLES as u64).skip(comm.rank()).step_by(comm.world_size());
        let mut numbers = [own.map(|sample| sample * 1000 + step).sum::<u64>()];
        let fails = self.fault.filter(|_| self.fault_at == step);
        if let Some(fault) = fails.filter(|_| !self.is_late) {
            fault();
        }
        comm.all_reduce_in_place(&mut numbers, ReduceOp::Sum)?;
        self.sum += numbers[0];
        if let Some(fault) = fails {
            fault();
        }
        // The loss is noticed here by those who have made half of the step.
        comm.barrier()?;
        self.made += 1;
        Ok(())
    }

    fn save(&self, state: &mut Vec<u8>) -> phalanx_train::Result<()> {
        state.extend(self.sum.to_le_bytes());
        Ok(())
    }

    fn load(&mut self, state: &[u8]) -> phalanx_train::Result<()> {
        self.sum = u64::from_le_bytes(state.try_into().unwrap());
        Ok(())
    }
}

fn expected(steps: u64) -> u64 {
    (0..steps).map(|step| (0..SAMPLES as u64).map(|sample| sample * 1000 + step).sum::<u64>()).sum()
}

/// Ranks as threads, of which one leaves its step by dropping everything.
fn with_a_loss(ranks: usize, victim: usize, fault_at: u64, every: u64, is_late: bool) {
    const STEPS: u64 = 9;
    let sums = phalanx::run(ranks, |comm| {
        let fault = (comm.rank() == victim).then_some((|| panic!("a fault")) as fn());
        let mut model = Sum { sum: 0, made: 0, fault, fault_at, is_late };
        let trainer = Trainer::new(Recovery::Shrink).snapshot_every(every).unwrap();
        let run = std::panic::AssertUnwindSafe(|| trainer.run(comm, &mut model, STEPS));
        match std::panic::catch_unwind(run) {
            Err(_) => None,
            Ok(outcome) => {
                let outcome = outcome.unwrap();
                assert_eq!((outcome.comm.world_size(), outcome.recoveries.len()), (ranks - 1, 1));
                Some((model.sum, model.made))
            }
        }
    })
    .unwrap();
    assert_eq!(sums.iter().filter(|sum| sum.is_none()).count(), 1);
    for (sum, made) in sums.into_iter().flatten() {
        assert_eq!(sum, expected(STEPS));
        assert!(made <= STEPS + 2 * every, "{made}");
    }
}

#[test]
fn the_result_is_that_of_an_undisturbed_run() {
    for ranks in [2, 3, 5] {
        for victim in [0, ranks - 1] {
            for (fault_at, every, is_late) in [(0, 1, false), (4, 1, true), (5, 3, true), (8, 2, false)] {
                with_a_loss(ranks, victim, fault_at, every, is_late);
            }
        }
    }
}

#[test]
fn errors_that_are_no_loss_end_the_training() {
    struct Wrong;
    impl Model for Wrong {
        fn step(&mut self, comm: &Comm, _: u64) -> phalanx_train::Result<()> {
            Ok(comm.all_reduce(&[1.0f32], &mut [0.0; 2], ReduceOp::Sum)?)
        }
        fn save(&self, _: &mut Vec<u8>) -> phalanx_train::Result<()> {
            Ok(())
        }
        fn load(&mut self, _: &[u8]) -> phalanx_train::Result<()> {
            Ok(())
        }
    }
    phalanx::run(2, |comm| {
        let error = Trainer::new(Recovery::Shrink).run(comm, &mut Wrong, 3).unwrap_err();
        assert!(matches!(error, Error::Comm(ref error) if !error.is_fatal()), "{error}");
    })
    .unwrap();
    assert!(Trainer::new(Recovery::Rebuild).snapshot_every(0).is_err());
}

#[test]
fn recoveries_can_be_limited() {
    let results = phalanx::run(2, |comm| {
        if comm.rank() == 1 {
            return None;
        }
        let mut model = Sum { sum: 0, made: 0, fault: None, fault_at: 0, is_late: false };
        Some(
            Trainer::new(Recovery::Shrink)
                .most_recoveries(0)
                .run(comm, &mut model, 3)
                .unwrap_err()
                .to_string(),
        )
    })
    .unwrap();
    assert!(results[0].as_ref().unwrap().contains("rank 1"), "{results:?}");
}
