//! An error of the library as [`Fields`]: it crosses process boundaries and can be compared there.

use crate::fields::Fields;
use phalanx::Error;

/// Everything an error says, by name. `kind` is always there, and so is `text`, what a user reads.
pub fn fields(error: &Error) -> Fields {
    let fields = Fields::new().with("text", error).with("fatal", error.is_fatal());
    match error {
        Error::Usage(e) => fields.with("kind", "usage").with("detail", format!("{e:?}")),
        Error::Mismatch(e) => fields
            .with("kind", "mismatch")
            .with("rank", e.rank)
            .with("theirs", &e.theirs)
            .with("other_rank", e.other_rank)
            .with("ours", &e.ours)
            .with("sequence", e.sequence),
        Error::Peer(e) => fields
            .with("kind", "peer")
            .with("rank", e.rank)
            .with("event", format!("{:?}", e.event))
            .with("reporter", e.reporter)
            .with("operation", &e.operation)
            .with("sequence", e.sequence)
            .with("waited_ms", e.waited.as_millis()),
        Error::Timeout(e) => fields
            .with("kind", "timeout")
            .with("operation", &e.operation)
            .with("sequence", e.sequence)
            .with("reporter", e.reporter)
            .with("waited_ms", e.waited.as_millis())
            .with("missing", list(e.missing.iter().map(|m| m.rank)))
            .with("last_seen", e.missing.iter().map(|m| m.last_seen.as_str()).collect::<Vec<_>>().join("; ")),
        Error::Aborted { rank } => fields.with("kind", "aborted").with("rank", rank),
        Error::LeftBehind { rank } => fields.with("kind", "left behind").with("rank", rank),
        Error::Library(e) => {
            let fields = fields.with("kind", "library").with("function", e.function).with("code", e.code);
            match &e.context {
                Some((rank, operation, sequence)) => {
                    fields.with("rank", rank).with("operation", operation).with("sequence", sequence)
                }
                None => fields,
            }
        }
        Error::LibraryNotFound(_) => fields.with("kind", "not found"),
        Error::MissingFunction(e) => fields.with("kind", "missing function").with("function", e.function),
        Error::System(e) => fields.with("kind", "system").with("call", e.call),
        Error::Bootstrap(e) => {
            fields.with("kind", "bootstrap").with("missing", list(e.missing.iter().copied()))
        }
        Error::Unsupported(_) => fields.with("kind", "unsupported"),
        other => panic!("the testkit does not know this error: {other:?}"),
    }
}

/// The error of a call that must fail; the text says what came instead.
pub fn expected<R>(result: phalanx::Result<R>, call: &str) -> Result<Fields, String> {
    match result {
        Ok(_) => Err(format!("{call} succeeded where an error is right")),
        Err(error) => Ok(fields(&error)),
    }
}

/// Numbers, separated by commas.
pub fn list(numbers: impl Iterator<Item = usize>) -> String {
    numbers.map(|n| n.to_string()).collect::<Vec<_>>().join(",")
}
