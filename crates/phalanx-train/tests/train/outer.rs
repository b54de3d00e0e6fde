//! Local SGD and DiLoCo.

use phalanx_train::device::Host;
use phalanx_train::optimizer::Sgd;
use phalanx_train::outer::Outer;

fn sgd(learning_rate: f64, momentum: f64, nesterov: bool) -> Sgd {
    Sgd { learning_rate, momentum, nesterov, weight_decay: 0.0 }
}

/// Parameters after each of two rounds: two ranks begin at 1, come to 0.8 and 0.6, and then both to 0.5.
fn rounds(optimizer: Sgd, through_a_checkpoint: bool) -> [f64; 2] {
    let results = phalanx::run(2, |comm| {
        let mut parameters = vec![1.0f64];
        let mut outer = Outer::new(&Host, &&parameters[..], optimizer).unwrap();
        let mut results = [0.0; 2];
        for (result, ends) in results.iter_mut().zip([[0.8, 0.6], [0.5, 0.5]]) {
            parameters[0] = ends[comm.rank()];
            outer.synchronize(&comm, &mut parameters).unwrap();
            *result = parameters[0];
            if through_a_checkpoint {
                let saved = outer.state().map(|state| state.clone());
                outer = Outer::new(&Host, &&[123.0][..], optimizer).unwrap();
                for (state, saved) in outer.state().into_iter().zip(saved) {
                    *state = saved;
                }
            }
        }
        results
    })
    .unwrap();
    assert_eq!(results[0].map(f64::to_bits), results[1].map(f64::to_bits), "the same on both ranks");
    results[0]
}

#[test]
fn outer_steps_are_as_worked_out_also_through_a_checkpoint() {
    for (optimizer, expected) in [
        (sgd(0.7, 0.9, true), [0.601, 0.29657]),
        (sgd(0.7, 0.9, false), [0.79, 0.398]),
        (sgd(1.0, 0.0, false), [0.7, 0.5]),
    ] {
        for through_a_checkpoint in [false, true] {
            for (here, expected) in rounds(optimizer, through_a_checkpoint).into_iter().zip(expected) {
                assert!((here - expected).abs() < 1e-12, "{optimizer:?}: {here} is not {expected}");
            }
        }
    }
}

#[test]
fn other_parameters_are_refused() {
    phalanx::run(1, |comm| {
        let mut outer = Outer::new(&Host, &&[1.0f32; 3][..], sgd(1.0, 0.0, false)).unwrap();
        let error = outer.synchronize(&comm, &mut vec![1.0f32; 2]).unwrap_err().to_string();
        assert!(error.contains("2 parameters, and 3 when"), "{error}");
    })
    .unwrap();
}
