//! Errors as the user sees them: one line each.

use std::io;

/// The error and its causes in one line. A cause that an outer message already contains is left out.
pub fn explain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text += &format!(": {cause}");
        }
    }
    text
}

/// Whether the error comes from writing to a pipe that nobody reads any more, as in `phalanx perf … | head`.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn a_cause_is_said_once() {
        let error =
            anyhow!("no space").context("cannot write x").context("cannot write x: no space; delete y");
        assert_eq!(explain(&error), "cannot write x: no space; delete y");
        assert_eq!(explain(&anyhow!("no space").context("cannot write x")), "cannot write x: no space");
    }
}
