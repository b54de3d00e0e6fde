//! The examples run, and say what they are meant to say.

#[cfg(target_os = "linux")]
use phalanx_testkit::built::binary;
use phalanx_testkit::built::example;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

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

/// Runs an example, which succeeds and says all of this.
fn says(name: &str, arguments: &[&str], parts: &[&str]) {
    let output = Command::new(example(name)).args(arguments).output().expect("it runs");
    let text = text(&output);
    assert!(output.status.success(), "{name} {arguments:?}: {text}");
    for part in parts {
        assert!(text.contains(part), "{name} {arguments:?}, {part:?}: {text}");
    }
}

#[test]
fn heat_3d_has_the_exact_result_with_any_number_of_ranks() {
    for ranks in ["1", "2", "6"] {
        says("heat_3d", &[ranks, "13", "20"], &["13³ cells", "20 steps", "largest error"]);
    }
    let output = Command::new(example("heat_3d")).args(["4", "1"]).output().expect("it runs");
    let text = text(&output);
    assert!(!output.status.success() && text.contains("too few for [2, 2, 1] ranks"), "{text}");
}

#[test]
fn word_count_counts_what_one_rank_counts() {
    let folder = tempfile::tempdir().expect("there is a folder for temporary files");
    let file = folder.path().join("text");
    std::fs::write(&file, "the cat and the dog\nAND THE BIRD\n").unwrap();
    let file = file.to_str().unwrap();
    for ranks in ["1", "3"] {
        says(
            "word_count",
            &[ranks, file],
            &["8 words, 5 of them different\n     3 the\n     2 and\n     1 bird\n"],
        );
        says("word_count", &[ranks], &["of them different"]);
    }
    let output = Command::new(example("word_count")).args(["3", "/nowhere"]).output().expect("it runs");
    let text = text(&output);
    assert!(!output.status.success() && text.contains("word_count: /nowhere: No such file"), "{text}");
}

#[test]
fn master_worker_looks_at_every_number() {
    for (ranks, limit, primes) in
        [("1", "30000", 3245), ("2", "30001", 3245), ("4", "100", 25), ("3", "0", 0)]
    {
        says("master_worker", &[ranks, limit], &[&format!("{primes} primes below {limit}\n")]);
    }
}

#[test]
fn sample_sort_sorts() {
    for (ranks, keys) in [("1", "1000"), ("3", "20000"), ("5", "1"), ("2", "0")] {
        says("sample_sort", &[ranks, keys], &["sorted; the largest share is"]);
    }
}

#[test]
fn hash_table_counts_every_update() {
    for (ranks, updates, all) in
        [("1", "1000", "1000 updates"), ("3", "20000", "60000 updates"), ("2", "0", "0 updates")]
    {
        says("hash_table", &[ranks, updates], &[all, "million/s"]);
    }
}

#[test]
fn shared_table_has_the_factors() {
    for ranks in ["1", "4"] {
        let parts = ["1229 primes below 10000; the most factors of a number are 13", "one table of 39 KiB"];
        says("shared_table", &[ranks, "10000"], &parts);
    }
}

#[test]
fn array_checkpoint_is_read_by_other_numbers_of_ranks() {
    let folder = tempfile::tempdir().expect("there is a folder for temporary files");
    let file = folder.path().join("state.safetensors");
    let file = file.to_str().unwrap();
    for (saving, loading) in [("1", "4"), ("3", "2"), ("4", "1")] {
        says("array_checkpoint", &[saving, "save", file], &["500 × 60 elements"]);
        says("array_checkpoint", &[loading, "load", file], &["30000 elements, as they were saved"]);
    }
    let output =
        Command::new(example("array_checkpoint")).args(["2", "load", "/nowhere"]).output().expect("it runs");
    let text = text(&output);
    assert!(!output.status.success() && text.contains("No such file"), "{text}");
}

/// The ported programs on host memory: the example, and their names.
fn ported_on_host() -> (PathBuf, Vec<String>) {
    let program = example("ported");
    let output = Command::new(&program).output().expect("it runs");
    let text = text(&output);
    assert!(!output.status.success() && text.contains("usage: ported PROGRAM [RANKS]"), "{text}");
    let names: Vec<String> =
        text.lines().map(str::trim).filter(|line| line.starts_with("rsmpi/")).map(str::to_owned).collect();
    assert!(names.len() >= 22, "{text}");
    (program, names)
}

#[test]
fn ported_programs_pass_with_any_number_of_ranks() {
    let (program, names) = ported_on_host();
    for name in names {
        for ranks in ["1", "2", "3", "4"] {
            let output = Command::new(&program).args([&name, ranks]).output().expect("it runs");
            let text = text(&output);
            assert!(output.status.success(), "{name} {ranks}: {text}");
            assert!(text.contains(&format!("{name} passed\n")), "{name} {ranks}: {text}");
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn ported_programs_pass_under_a_launcher() {
    let ((program, names), launcher) = (ported_on_host(), binary("phalanx"));
    for name in names {
        let mut command = Command::new(&launcher);
        command.args(["launch", "-n", "3", "--"]).arg(&program).arg(&name).env("PHALANX_TIMEOUT", "60");
        let output = command.output().expect("it runs");
        let text = text(&output);
        assert!(output.status.success(), "{name}: {text}");
        assert_eq!(text.matches(&format!("{name} passed\n")).count(), 3, "{text}");
    }
}

/// cudarc alone would panic.
#[test]
fn ported_programs_say_that_there_is_no_driver() {
    for name in ["cudarc/all_reduce", "cudarc/single_thread"] {
        let mut command = Command::new(example("ported"));
        let output = command.arg(name).env("PHALANX_CUDA_LIB", "/no/such/driver").output().expect("it runs");
        let text = text(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("ported: the CUDA driver was not found (tried /no/such/driver"), "{text}");
    }
}

/// Lines that are neither blank nor comments.
fn lines_of_code(file: &Path) -> usize {
    let source = std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let is_code = |line: &&str| !line.is_empty() && !line.starts_with("//");
    source.lines().map(str::trim).filter(is_code).count()
}

/// The table of the ported programs has each of them, with the lines that its file has.
#[test]
fn the_table_of_ported_programs_has_their_lines() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let main = std::fs::read_to_string(package.join("examples/ported/main.rs")).unwrap();
    let entries = main.lines().filter_map(|line| line.trim().strip_prefix("(\"")?.split_once('"'));
    for (name, rest) in entries {
        let row = main.lines().find(|line| line.starts_with(&format!("//! | `{name}` |")));
        let row = row.unwrap_or_else(|| panic!("{name} has no row"));
        let own = row.trim_end_matches([' ', '|']).rsplit(' ').next().unwrap();
        // `init` and `finalize` of programs for ranks are in the file of all.
        let added = if rest.contains("AllGpus") { 0 } else { 2 };
        let lines = lines_of_code(&package.join(format!("examples/ported/{name}.rs"))) + added;
        assert_eq!(own, lines.to_string(), "{row}");
    }
    let row = main.lines().find(|line| line.contains("phalanx-candle/examples/train_ddp.rs")).unwrap();
    let lines = lines_of_code(&package.join("../phalanx-candle/examples/train_ddp.rs"));
    assert!(row.ends_with(&format!(" {lines} |")), "{lines}: {row}");
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

/// A process that another has started, whose environment has this entry.
#[cfg(target_os = "linux")]
fn child_with(parent: u32, entry: &str) -> Option<i32> {
    let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
    let has_entry = |pid: &i32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|other| other == entry.as_bytes())
    };
    children.split_whitespace().filter_map(|pid| pid.parse().ok()).find(has_entry)
}

#[cfg(target_os = "linux")]
#[test]
fn train_digits_learns_the_same_although_two_ranks_are_killed() {
    use std::io::{BufRead, BufReader};
    let program = example("train_digits");
    let launcher = binary("phalanx");
    let epochs = |output: &str| {
        let line = output.lines().rfind(|line| line.contains("epoch 20:")).expect("it ends").to_owned();
        line.split_once("accuracy ")
            .and_then(|(_, rest)| rest.split_once('%'))
            .map(|(accuracy, _)| accuracy.to_owned())
    };
    let launch = || {
        let mut command = Command::new(&launcher);
        command.args(["launch", "-n", "3", "--restarts", "2", "--"]).arg(&program).arg("--rebuild");
        command.env("PHALANX_TIMEOUT", "60").env("PHALANX_BACKEND", "host");
        command
    };
    let undisturbed = launch().output().expect("it runs");
    let undisturbed = String::from_utf8_lossy(&undisturbed.stdout).into_owned();

    let mut job =
        launch().stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    // Rank 0 after the second epoch, and rank 2 after the fifth.
    let mut kills = vec![("epoch  5:", "PHALANX_RANK=2"), ("epoch  2:", "PHALANX_RANK=0")];
    let mut said = String::new();
    for line in BufReader::new(job.stdout.take().unwrap()).lines().map_while(Result::ok) {
        if let Some((_, rank)) = kills.pop_if(|(epoch, _)| line.contains(*epoch)) {
            let pid = child_with(job.id(), rank).expect("the rank runs");
            assert!(Command::new("kill").args(["-KILL", &pid.to_string()]).status().unwrap().success());
        }
        said += &format!("{line}\n");
    }
    let output = job.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && kills.is_empty(), "{said}{stderr}");
    assert_eq!(stderr.matches("failed: killed by SIGKILL").count(), 2, "{stderr}");
    assert!(said.contains("all 3 ranks hold the same 4810 weights, bit for bit"), "{said}{stderr}");
    assert_eq!(epochs(&said), epochs(&undisturbed), "{said}{undisturbed}");
}
