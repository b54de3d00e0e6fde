//! The examples run, and say what they are meant to say.

use std::path::PathBuf;
use std::process::{Command, Output};

/// Builds an example (a matter of moments when it is built already) and answers where it is. That it is not built again, with all below it,
/// takes the features of the whole workspace, and nothing of what cargo says to a test: build scripts look at such variables (ring's).
fn example(name: &str) -> PathBuf {
    let mut cargo = Command::new(env!("CARGO"));
    for (variable, _) in std::env::vars_os() {
        let text = variable.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            cargo.env_remove(&variable);
        }
    }
    let output = cargo
        .args(["build", "--workspace", "--example", name, "--message-format", "json"])
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

fn text(output: &Output) -> String {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    format!("{}\n{out}{err}", output.status)
}

/// The held-out accuracy of the last epoch, in per cent.
fn accuracy(output: &str) -> Option<f32> {
    let line = output.lines().rfind(|line| line.starts_with("epoch "))?;
    line.split_once("accuracy ")?.1.split_once(" %")?.0.parse().ok()
}

#[test]
fn first_adds_up() {
    let output = Command::new(example("first")).output().expect("first runs");
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    for rank in 0..4 {
        assert!(text.contains(&format!("rank {rank}: 0 + 1 + 2 + 3 = 6\n")), "{text}");
    }
}

#[test]
fn train_digits_learns_with_any_number_of_ranks() {
    let program = example("train_digits");
    for ranks in ["1", "2", "5"] {
        let output = Command::new(&program).args(["--ranks", ranks]).output().expect("it runs");
        let text = text(&output);
        assert!(output.status.success(), "{ranks} ranks: {text}");
        assert!(accuracy(&text).is_some_and(|percent| percent >= 95.0), "{ranks} ranks: {text}");
        assert!(text.contains(&format!("all {ranks} ranks hold the same 4810 weights")), "{text}");
    }
}

#[test]
fn train_digits_fails_when_it_has_not_learnt() {
    let output = Command::new(example("train_digits")).args(["--epochs", "0"]).output().expect("it runs");
    let text = text(&output);
    assert!(!output.status.success() && text.contains("95 % are required"), "{text}");
}

#[cfg(target_os = "linux")]
#[test]
fn train_digits_learns_with_processes() {
    let program = example("train_digits");
    let job = format!("examples-{}-{:?}", std::process::id(), std::time::SystemTime::now());
    let ranks: Vec<_> = ["0", "1", "2"]
        .into_iter()
        .map(|rank| {
            Command::new(&program)
                .env("PHALANX_RANK", rank)
                .env("PHALANX_LOCAL_RANK", rank)
                .env("PHALANX_WORLD_SIZE", "3")
                .env("PHALANX_LOCAL_WORLD_SIZE", "3")
                .env("PHALANX_JOB", &job)
                // If one of them fails to start, the others do not wait for five minutes.
                .env("PHALANX_TIMEOUT", "30")
                .stdout(std::process::Stdio::piped())
                .stderr(std::process::Stdio::piped())
                .spawn()
                .expect("it starts")
        })
        .collect();
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = child.wait_with_output().expect("it ends");
        let text = text(&output);
        assert!(output.status.success(), "rank {rank}: {text}");
        // Only rank 0 talks.
        assert_eq!(accuracy(&text).is_some_and(|percent| percent >= 95.0), rank == 0, "rank {rank}: {text}");
    }
}

/// A build that was copied to another place or machine, and is run from anywhere, has its images.
#[test]
fn the_training_examples_carry_their_images_with_them() {
    let folder = tempfile::tempdir().expect("there is a folder for temporary files");
    for name in ["train_digits", "train_digits_gpu"] {
        let bytes = std::fs::read(example(name)).expect("it is built");
        let names_a_file = bytes.windows(13).any(|part| part == b"digits.csv.gz");
        assert!(!names_a_file, "{name} looks for a file of the machine on which it was built");
    }
    let moved = folder.path().join("moved");
    std::fs::copy(example("train_digits"), &moved).expect("it can be copied");
    let output =
        Command::new(moved).args(["--epochs", "10"]).current_dir(folder.path()).output().expect("it runs");
    let text = text(&output);
    assert!(output.status.success(), "{text}");
}

#[test]
fn other_images_can_be_named() {
    let output = Command::new(example("train_digits")).args(["--data", "/nowhere/images.gz"]).output();
    let text = text(&output.expect("it runs"));
    assert!(text.contains("train_digits: /nowhere/images.gz: No such file"), "{text}");
}
