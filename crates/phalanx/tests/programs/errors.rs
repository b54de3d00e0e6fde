//! What a user reads of an error: `main` that returns one and `unwrap` print its `Debug` form.

use phalanx::{
    Attempt, BootstrapError, Error, LibraryError, MismatchError, MissingFunction, NotFound, PeerError,
    PeerEvent, SystemError, TimeoutError, UnsupportedError, UsageError,
};
use std::error::Error as StdError;
use std::io;
use std::time::Duration;

/// An error of each kind, as its own type and as phalanx's.
fn all() -> Vec<Box<dyn StdError>> {
    let text = str::to_owned;
    let usage = UsageError::WorldSize { world_size: 0, limit: 512 };
    let unsupported = UnsupportedError { what: text("a"), why: text("b"), remedy: text("c") };
    let bootstrap = BootstrapError { problem: text("a"), remedy: text("b"), missing: vec![1] };
    let (theirs, ours) = (text("barrier"), text("all_reduce"));
    let mismatch = MismatchError { rank: 1, theirs, other_rank: 0, ours, sequence: 3 };
    let peer = PeerError {
        rank: 1,
        event: PeerEvent::Died,
        reporter: 0,
        operation: text("barrier"),
        sequence: 3,
        waited: Duration::from_secs(1),
        refusal: None,
    };
    let timeout = TimeoutError {
        operation: text("barrier"),
        sequence: 3,
        reporter: 0,
        waited: Duration::from_secs(1),
        missing: Vec::new(),
    };
    let library = LibraryError {
        library: text("NCCL"),
        function: "ncclAllReduce",
        code: 3,
        text: text("internal error"),
        context: None,
        fatal: false,
    };
    let missing = MissingFunction {
        function: "ncclCommRevoke",
        library: "NCCL",
        version: text("2.10"),
        path: "/lib/libnccl.so.2".into(),
    };
    let not_found = NotFound { library: "NCCL", variable: "PHALANX_NCCL_LIB", tried: Vec::<Attempt>::new() };
    let system = SystemError {
        call: "memfd_create",
        source: io::Error::from(io::ErrorKind::PermissionDenied).into(),
        remedy: text("allow it"),
    };
    macro_rules! both {
        ($($error:expr),*) => {
            vec![$(Box::new($error.clone()) as Box<dyn StdError>, Box::new(Error::from($error))),*]
        };
    }
    let mut all =
        both![usage, unsupported, bootstrap, mismatch, peer, timeout, library, missing, not_found, system];
    all.push(Box::new(Error::Aborted { rank: 1 }));
    all
}

#[test]
fn an_error_that_main_returns_reads_as_its_message() {
    for error in all() {
        assert_eq!(format!("{error:?}"), error.to_string());
        assert_eq!(format!("{error:#?}"), error.to_string());
    }
}

#[test]
fn unwrap_shows_the_message() {
    let fail = || -> phalanx::Result<()> { Err(Error::Aborted { rank: 1 }) };
    let message = std::panic::catch_unwind(|| fail().unwrap()).unwrap_err();
    let message = message.downcast_ref::<String>().expect("unwrap formats its message");
    assert!(message.ends_with(": rank 1 aborted the communicator"), "{message}");
}

/// The causes are what the message does not have yet: none is said twice, none is lost.
#[test]
fn a_cause_is_said_once() {
    let texts = all().into_iter().map(|error| format!("{error:?}"));
    let system: Vec<String> = texts.filter(|text| text.contains("memfd_create")).collect();
    assert_eq!(system, ["memfd_create failed: permission denied; allow it"; 2]);
}

/// Each of two ranks waits for the other, in different communicators.
#[test]
fn a_timeout_of_two_communicators_in_opposite_order_names_both_and_both_operations() {
    let builder = phalanx::Comm::builder().timeout(Duration::from_millis(300));
    let errors = builder.run(2, |world| {
        let halves = [(); 2].map(|()| world.split(Some(0), 0).unwrap().expect("all are of this colour"));
        match world.rank() {
            0 => halves[0].barrier().unwrap_err().to_string(),
            _ => {
                halves[1].all_reduce_in_place(&mut [1.0f32], phalanx::ReduceOp::Sum).unwrap_err().to_string()
            }
        }
    });
    let errors = errors.unwrap();
    // The rank whose deadline passes first sees where the other waits. That one may then find it gone.
    let names_both = |error: &String| {
        let place = error.split_once("; it waits in ").map(|(_, place)| place)?;
        let names = place.split_once("of communicator ")?.1.split_once(", not of communicator ")?;
        let same = names.1.starts_with(names.0);
        let operations = error.contains("barrier") && error.contains("all_reduce(f32 × 1, sum)");
        Some(operations && !same)
    };
    assert!(errors.iter().any(|error| names_both(error) == Some(true)), "{errors:?}");
}

/// A stream of a communicator without a GPU: the error names the backend, and says how to get one.
#[test]
fn a_communicator_of_host_memory_has_no_stream() {
    let builder = phalanx::Comm::builder().backend(phalanx::BackendKind::Host);
    let comms = builder.run(2, |comm| comm).unwrap();
    let refused = [comms[0].cuda_stream().unwrap_err(), comms[0].hip_stream().unwrap_err()];
    for (error, (kind, backend)) in refused.iter().zip([("CUDA", "nccl"), ("HIP", "rccl")]) {
        assert!(matches!(error, Error::Unsupported(_)) && !error.is_fatal(), "{error}");
        let expected = format!(
            "a {kind} stream is not available: the communicator is of the backend host; give each rank a GPU, and \
             choose the backend {backend}: by Builder::backend or PHALANX_BACKEND; `phalanx doctor` says whether it works"
        );
        assert_eq!(error.to_string(), expected);
    }
}
