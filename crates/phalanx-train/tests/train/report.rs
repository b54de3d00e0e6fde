//! Step reports, memory estimates, and what a rank sends.

use phalanx::ReduceOp;
use phalanx_train::buckets::{GradientBuckets, Parameter, Settings};
use phalanx_train::device::Host;
use phalanx_train::mesh::{Axis, Mesh, MeshShape, Placement, Plan};
use phalanx_train::report::{MemoryPlan, RankStep, Sharding, StepReport, StepTimer, Traffic};
use std::time::Duration;

fn rank(computing: f64, communicating: f64, samples: u64) -> RankStep {
    RankStep { computing_seconds: computing, communicating_seconds: communicating, samples }
}

#[test]
fn a_report_names_the_straggler_and_divides_the_time() {
    let ranks = vec![rank(1.0, 2.5, 10), rank(3.0, 0.5, 20), rank(1.5, 2.0, 10), rank(1.0, 2.5, 9)];
    let report = StepReport::new(7, ranks);
    assert_eq!((report.seconds, report.samples), (3.5, 49));
    assert_eq!(report.samples_per_second, 14.0);
    assert_eq!(report.computing_seconds, 6.5 / 4.0);
    // Rank 1 waited for nobody: the rest of what the others waited was for it.
    assert_eq!((report.communicating_seconds, report.waiting_seconds), (0.5, 5.5 / 4.0));
    assert_eq!((report.straggler.rank, report.straggler.behind_median_seconds), (1, 2.0));
    let text = report.to_string();
    assert!(text.starts_with("step 7: 3500.0 ms, 14 samples/s, computing 1625.0 ms"), "{text}");
    assert!(text.ends_with("straggler rank 1 (+2000.0 ms)"), "{text}");

    let json = serde_json::to_string(&report).unwrap();
    assert!(json.contains(r#""straggler":{"rank":1,"behind_median_seconds":2.0}"#), "{json}");
    assert_eq!(serde_json::from_str::<StepReport>(&json).unwrap(), report);
}

#[test]
fn all_ranks_get_the_same_report_of_a_slow_one() {
    let reports = phalanx::run(3, |comm| {
        comm.barrier().unwrap();
        let mut timer = StepTimer::begin();
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(200));
        }
        let mut gradient = [1.0f32; 10];
        timer.communicating(|| comm.all_reduce_in_place(&mut gradient, ReduceOp::Sum)).unwrap();
        timer.end(&comm, 3, 1 + comm.rank() as u64).unwrap()
    })
    .unwrap();
    let report = &reports[0];
    assert!(reports.iter().all(|other| other == report));
    assert_eq!((report.step, report.samples, report.straggler.rank), (3, 6, 1));
    assert!(report.seconds >= 0.2 && report.ranks[1].computing_seconds >= 0.2, "{report:?}");
    // What the others waited is theirs, and not the straggler's.
    assert!(report.ranks[0].communicating_seconds > report.communicating_seconds, "{report:?}");
}

#[cfg(feature = "metrics")]
#[test]
fn a_report_is_published_as_metrics() {
    use metrics::{Counter, Gauge, Key, KeyName, Metadata, Recorder, SharedString, Unit};
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Arc, Mutex};

    #[derive(Default)]
    struct Kept(Mutex<BTreeMap<String, Arc<AtomicU64>>>);

    impl Kept {
        fn of(&self, name: &str) -> Arc<AtomicU64> {
            self.0.lock().unwrap().entry(name.to_owned()).or_default().clone()
        }
    }

    impl Recorder for Kept {
        fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            Counter::from_arc(self.of(key.name()))
        }
        fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::from_arc(self.of(key.name()))
        }
        fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> metrics::Histogram {
            metrics::Histogram::noop()
        }
    }

    let kept = Kept::default();
    metrics::with_local_recorder(&kept, || {
        for step in 0..3 {
            StepReport::new(step, vec![rank(1.0, 0.5, 8), rank(1.25, 0.25, 8)]).publish();
        }
    });
    let value = |name: &str| kept.of(&format!("phalanx_train_{name}")).load(Ordering::Relaxed);
    let gauge = |name: &str| f64::from_bits(value(name));
    assert_eq!((value("steps_total"), value("samples_total")), (3, 48));
    assert_eq!((gauge("step_seconds"), gauge("straggler_rank")), (1.5, 1.0));
    assert_eq!((gauge("communicating_seconds"), gauge("waiting_seconds")), (0.25, 0.125));
    assert_eq!((gauge("computing_seconds"), gauge("samples_per_second")), (1.125, 16.0 / 1.5));
}

#[test]
fn an_estimate_counts_what_each_kind_of_sharding_divides() {
    let mesh = MeshShape::new(&[(Axis::Data, 2), (Axis::Shard, 4), (Axis::Tensor, 2)]).unwrap();
    let plan = Plan::new().rule("**.weight", &[(Axis::Tensor, Placement::Split(0))]);
    let layer = [("up.weight", vec![64, 64]), ("norm", vec![512])];
    let groups = [&layer[..]; 5];
    // Of each layer a rank has half of the weight and all of the norm: 2048 + 512 numbers.
    let len = 2560;
    let of = |sharding| {
        let mut plan_of_memory = MemoryPlan::new(&mesh, sharding);
        plan_of_memory.parameters = phalanx::DType::Bf16;
        plan_of_memory.activations = 1000;
        plan_of_memory.of_rank(3, &plan, &groups).unwrap()
    };
    let (all, part) = (5 * len, 5 * len / 4);
    let none = of(Sharding::None);
    assert_eq!((none.parameters, none.optimizer, none.gradients), (2 * all, 12 * all, 4 * all));
    let optimizer = of(Sharding::Optimizer);
    assert_eq!(
        (optimizer.parameters, optimizer.optimizer, optimizer.gradients),
        (2 * all, 12 * part, 2 * all + 4 * part)
    );
    let gradients = of(Sharding::Gradients);
    assert_eq!(
        (gradients.parameters, gradients.optimizer, gradients.gradients),
        (2 * all, 12 * part, 4 * part)
    );
    let parameters = of(Sharding::Parameters);
    assert_eq!((parameters.parameters, parameters.optimizer), (2 * (2 * len + len / 4), 12 * part));
    // The gradient, its sum, and this rank's part of that.
    assert_eq!(parameters.reducing, (2 + 4) * len + 4 * len / 4);
    assert_eq!(parameters.total() - parameters.reducing, 2 * (2 * len + len / 4) + 16 * part + 1000);
    assert!(parameters.to_string().contains("activations 1000 B"), "{parameters}");
    let error = MemoryPlan::new(&mesh, Sharding::None).of_rank(16, &plan, &groups).unwrap_err().to_string();
    assert!(error.contains("rank 16 of a mesh of 16 ranks"), "{error}");
}

/// A step with two buckets on a mesh, as a program has it.
fn step(comm: phalanx::Comm) -> phalanx_train::Result<f32> {
    let mesh = Mesh::new(&comm, &[(Axis::Data, 2), (Axis::Tensor, 2)])?;
    let data = mesh.comm(Axis::Data);
    let parameters = [Parameter::new::<f32>("a", 100), Parameter::new::<f32>("b", 50)];
    let settings = Settings { bucket_bytes: 400, ..Settings::default() };
    let mut buckets = GradientBuckets::new(data, &Host, &parameters, settings)?;
    for _ in 0..2 {
        buckets.begin(data, 1.0)?;
        let mut activations = [1.0f32; 8];
        mesh.comm(Axis::Tensor).all_reduce_in_place(&mut activations, ReduceOp::Sum)?;
        buckets.add(data, "b", &&[2.0f32; 50][..])?;
        buckets.add(data, "a", &&[3.0f32; 100][..])?;
        buckets.finish(data)?;
    }
    let mut gradient = [0.0f32; 100];
    buckets.read("a", &mut &mut gradient[..])?;
    Ok(gradient[0])
}

#[test]
fn a_dry_run_lists_what_a_step_of_the_program_sends() {
    let (gradient, traffic) = Traffic::of_rank(2, 4, step).unwrap();
    assert_eq!(gradient, 3.0);
    assert!(phalanx::run(4, |comm| step(comm).unwrap()).unwrap().into_iter().all(|gradient| gradient == 3.0));
    let reductions = traffic.lines.iter().filter(|line| line.operation == "all_reduce");
    let reductions: Vec<_> =
        reductions.map(|line| (line.times, line.send_bytes, line.members.clone())).collect();
    // Tensor, and then the buckets: in the order of the names first, and then in the order of their gradients.
    let (tensor, data) = (vec![2, 3], vec![0, 2]);
    assert_eq!(
        reductions,
        [
            (1, 32, tensor.clone()),
            (1, 400, data.clone()),
            (1, 200, data.clone()),
            (1, 32, tensor),
            (1, 200, data.clone()),
            (1, 400, data)
        ]
    );
    assert_eq!(traffic.bytes("all_reduce"), 2 * (32 + 400 + 200));
    let text = traffic.to_string();
    assert!(text.starts_with("rank 2 of 4\n     1 × split_grid, 4 ranks from 0 to 3\n"), "{text}");
    assert!(text.contains("1 × all_reduce of f32, 400 B in, 400 B out, 2 ranks from 0 to 2\n"), "{text}");
    assert!(text.contains("together: all_gather "), "{text}");
    let json = serde_json::to_value(&traffic).unwrap();
    assert_eq!(json["lines"][0]["operation"], "split_grid");
    assert_eq!(json["lines"][0]["members"], serde_json::json!([0, 1, 2, 3]));
}
