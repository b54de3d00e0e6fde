//! Builds a program of the workspace for a test that runs it.

use std::path::PathBuf;
use std::process::Command;

/// Builds an example (a matter of moments when it is built already) and answers where it is.
pub fn example(name: &str) -> PathBuf {
    built("--example", name)
}

/// The same of a program.
pub fn binary(name: &str) -> PathBuf {
    built("--bin", name)
}

/// Builds something that can be run. That it is not built again, with all below it,
/// takes the features of the whole workspace, those for tests (an example needs them), and nothing of what cargo says to a test: build
/// scripts look at such variables (ring's).
fn built(kind: &str, name: &str) -> PathBuf {
    let mut cargo = Command::new(env!("CARGO"));
    for (variable, _) in std::env::vars_os() {
        let text = variable.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            cargo.env_remove(&variable);
        }
    }
    let output = cargo
        .args(["build", "--workspace", kind, name, "--example", "first", "--message-format", "json"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    let messages = String::from_utf8_lossy(&output.stdout);
    let own = format!("\"name\":\"{name}\"");
    let line = messages.lines().filter(|line| line.contains(&own));
    let path = line.filter_map(|line| line.split_once("\"executable\":\"")).next_back();
    let path = path.and_then(|(_, rest)| rest.split_once('"')).map(|(path, _)| path.to_owned());
    let errors = String::from_utf8_lossy(&output.stderr);
    PathBuf::from(path.unwrap_or_else(|| panic!("{name} was not built:\n{errors}")))
}
