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
    let panic = std::panic::catch_unwind(|| {
        let failed: phalanx::Result<()> = Err(Error::Aborted { rank: 1 });
        failed.unwrap();
    });
    let message = panic.unwrap_err();
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
