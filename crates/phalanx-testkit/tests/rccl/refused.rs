//! What HIP and RCCL refuse is an error that says who refused what; what is chosen without a word is told.

use crate::flavour::NEWEST;
use crate::world::must;
use libtest_mimic::{Failed, Trial};
use phalanx::rccl::Config;
use phalanx::{BackendKind, Comm, Error, ReduceOp, UsageError, hip, rccl};
use phalanx_testkit::Scenario;
use phalanx_testkit::emulated::Emulated;
use phalanx_testkit::processes::Launch;
use phalanx_testkit::scenario::Outcome;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::process("refuses_memory", refuses_memory),
    Scenario::process("loses_a_device", loses_a_device),
    Scenario::process("has_no_pools", has_no_pools),
    Scenario::process("has_no_gpu", has_no_gpu),
    Scenario::process("is_chosen", is_chosen),
    Scenario::process("refuses_settings", refuses_settings),
    Scenario::process("is_of_rocm_5", is_of_rocm_5),
    Scenario::process("lacks_a_function_of_hip", lacks_a_function_of_hip),
];

pub fn trials() -> Vec<Trial> {
    type Make = fn() -> std::io::Result<Emulated>;
    let trials: [(&str, Make); 8] = [
        ("refuses_memory", || Ok(newest()?.set("FAIL", "hipMallocAsync:1:2"))),
        ("loses_a_device", || Ok(newest()?.set("FAIL", "hipStreamQuery:1:719"))),
        ("has_no_pools", || Ok(newest()?.set("ASYNC_ALLOC", 0))),
        ("has_no_gpu", || Ok(newest()?.set("DEVICES", 0))),
        ("is_chosen", newest),
        ("refuses_settings", newest),
        ("is_of_rocm_5", || {
            let absent =
                ["hipMallocAsync", "hipFreeAsync", "hipGetDevicePropertiesR0600", "hipStreamIsCapturing"];
            Ok(Emulated::rccl_without("2.15.5", &absent)?.set("HIP_VERSION", 50_400_000))
        }),
        ("lacks_a_function_of_hip", || Emulated::rccl_without(NEWEST, &["hipMemsetAsync"])),
    ];
    let trial = |(name, make): (&'static str, Make)| {
        Trial::test(format!("refused/{name}"), move || run(name, &make()?))
    };
    trials.into_iter().map(trial).collect()
}

fn newest() -> std::io::Result<Emulated> {
    Emulated::rccl(NEWEST)
}

fn run(scenario: &str, emulated: &Emulated) -> Result<(), Failed> {
    let launch = emulated.launch(Launch::alone(scenario));
    Ok(launch.reports().map(drop)?)
}

fn alone<R: Send>(f: impl Fn(Comm) -> R + Sync) -> Result<R, String> {
    let run = Comm::builder().backend(BackendKind::Rccl).run(1, f);
    must("run", run)?.pop().ok_or_else(|| "no rank".to_owned())
}

fn refuses_memory(_: &[String]) -> Outcome {
    let stream = must("device", hip::Device::new(0))?.default_stream();
    let error = stream.alloc_zeros::<f32>(10).unwrap_err();
    let Error::Library(refused) = &error else { return Err(format!("{error:?}")) };
    assert_eq!((refused.function, refused.code), ("hipMallocAsync", 2));
    assert!(error.to_string().contains("HIP 6.4") && error.to_string().contains("out of memory"), "{error}");
    must("the next", stream.alloc_zeros::<f32>(10))?;
    Ok(String::new())
}

/// The device fails under an operation: that is the communicator's end, with HIP's words.
fn loses_a_device(_: &[String]) -> Outcome {
    let error = alone(|comm| comm.all_reduce_in_place(&mut [1.0f32; 8], ReduceOp::Sum).unwrap_err())?;
    assert!(error.is_fatal(), "{error}");
    assert!(error.to_string().contains("hipErrorLaunchFailure"), "{error}");
    Ok(String::new())
}

/// Memory then comes from `hipMalloc`; what needs a pool says so.
fn has_no_pools(_: &[String]) -> Outcome {
    alone(|comm| -> Result<(), String> {
        let stream = must("stream", comm.hip_stream())?;
        let mut buffer = must("upload", stream.clone_htod(&[1.0f32; 100]))?;
        must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
        assert_eq!(must("download", stream.clone_dtoh(&buffer))?, [1.0; 100]);
        // Dropped with an operation of another stream in flight.
        let other = must("new_stream", must("device", hip::Device::new(0))?.new_stream())?;
        must("all_reduce", must("on", comm.on(&other))?.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
        drop(buffer);
        let mut buffer = must("upload", stream.clone_htod(&[1.0f32; 100]))?;
        let error = comm.all_to_all_in_place(&mut buffer).unwrap_err();
        assert!(matches!(error, Error::Unsupported(_)) && error.to_string().contains("pool"), "{error}");
        Ok(())
    })??;
    Ok(String::new())
}

fn has_no_gpu(_: &[String]) -> Outcome {
    assert_eq!((must("device_count", hip::device_count())?, must("gpus", rccl::gpus())?), (0, 0..0));
    let error = rccl::init_all(0..0).unwrap_err();
    assert!(
        matches!(&error, Error::Usage(usage) if matches!(**usage, UsageError::WorldSize { .. })),
        "{error}"
    );
    let error = Comm::builder().backend(BackendKind::Rccl).run(1, |_| ()).unwrap_err();
    assert!(error.to_string().contains("HIP_VISIBLE_DEVICES"), "{error}");
    assert!(hip::Device::new(0).is_err());
    assert_eq!(must("choose", phalanx::choose())?.backend, BackendKind::Solo);
    Ok(String::new())
}

/// AMD's GPUs are taken where there are none of NVIDIA's.
fn is_chosen(_: &[String]) -> Outcome {
    if phalanx::nccl::version().is_ok() {
        return Ok("this machine has NCCL, which comes first".into());
    }
    let choice = must("choose", phalanx::choose())?;
    assert_eq!(choice.backend, BackendKind::Rccl, "{choice:?}");
    assert!(choice.reason.contains("AMD"), "{choice:?}");
    let ranks = must("run", phalanx::run(2, |comm| (comm.backend(), comm.gpu())))?;
    assert_eq!(ranks, [(BackendKind::Rccl, Some(0)), (BackendKind::Rccl, Some(1))]);
    let version = must("version", hip::version())?;
    assert_eq!(version, "6.4.43483");
    let five = Comm::builder().backend(BackendKind::Rccl).run(5, |_| ()).unwrap_err();
    assert!(five.to_string().contains("RCCL for 5 ranks"), "{five}");
    Ok(String::new())
}

/// RCCL's layout ends before NCCL's does.
fn refuses_settings(_: &[String]) -> Outcome {
    let made = |set: fn(&mut Config)| {
        let mut config = Config::default();
        set(&mut config);
        Comm::builder().backend(BackendKind::Rccl).nccl(config).run(1, |comm| comm.barrier())
    };
    must("max_p2p_peers", made(|config| config.max_p2p_peers = Some(4)))?.pop().ok_or("a rank")?.unwrap();
    let error = made(|config| config.graph_stream_ordering = Some(1)).unwrap_err();
    assert!(error.to_string().contains("RCCL setting graph_stream_ordering"), "{error}");
    assert!(error.to_string().contains("PHALANX_RCCL_LIB"), "{error}");
    Ok(String::new())
}

fn is_of_rocm_5(_: &[String]) -> Outcome {
    assert_eq!(must("version", hip::version())?, "5.4.0");
    let properties = must("properties", must("device", hip::Device::new(1))?.properties())?;
    assert!(
        properties.name.contains("AMD GPU 1") && properties.architecture.starts_with("gfx"),
        "{properties:?}"
    );
    has_no_pools(&[])
}

fn lacks_a_function_of_hip(_: &[String]) -> Outcome {
    let error = rccl::gpus().unwrap_err();
    assert!(
        error.to_string().contains("hipMemsetAsync") && error.to_string().contains("PHALANX_HIP_LIB"),
        "{error}"
    );
    Ok(String::new())
}
