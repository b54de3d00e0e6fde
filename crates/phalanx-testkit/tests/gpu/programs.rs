//! The program and the examples, which cargo builds beside this suite.

use libtest_mimic::{Failed, Trial};
use phalanx_testkit::emulated::Emulated;
use std::path::PathBuf;
use std::process::Command;

/// A command line, and what its output has.
type Job = (&'static str, &'static [&'static str]);

/// Without kernels of their own.
const ANYWHERE: [Job; 5] = [
    ("all_reduce_gpu 2", &["[1.0, 1.0]"]),
    ("phalanx perf all_reduce -t 2 -R 1 -b 8 -e 64K -f 64 -n 3 -w 1", &["registered GPU memory", "0 OK"]),
    ("phalanx perf all_gather -p 2 -R 2 -b 64 -e 64K -f 64 -n 3 -w 1", &["symmetric GPU memory", "0 OK"]),
    ("phalanx perf all_reduce -t 2 -R 2 -G 3 -b 8 -e 64K -f 64 -n 3 -w 1", &["CUDA graph", "0 OK"]),
    (
        "phalanx perf all_gather -g 2 -z 1 -b 64 -e 64K -f 64 -n 3 -w 1",
        &["2 ranks (threads)", "Each iteration is waited for", "0 OK"],
    ),
];

/// With kernels, or cuBLAS.
const ON_GPUS: [Job; 6] = [
    ("tensor_parallel 2", &["column layer", "row layer", "equal"]),
    ("ring_attention 2", &["of the exchange were behind the attention"]),
    ("overlap 2", &["rank 0's GPU did both for"]),
    ("train_digits_gpu 2", &["epoch 20", "all 2 ranks hold the same 4810 weights, bit for bit"]),
    ("phalanx launch -n 2 -- train_digits_gpu", &["epoch 20", "all 2 ranks hold the same 4810 weights"]),
    ("phalanx launch -n 2 -- overlap", &["rank 0's GPU did both for"]),
];

/// What is said where they lack libraries of CUDA.
const WITHOUT_CUDA: [Job; 2] = [
    ("tensor_parallel 2", &["libcublas.so", "was not found", "LD_LIBRARY_PATH"]),
    ("ring_attention 2", &["libnvrtc.so", "was not found", "LD_LIBRARY_PATH"]),
];

pub fn trials(gpus: usize) -> Vec<Trial> {
    let emulated = crate::world::are_emulated();
    let anywhere = ANYWHERE.map(|job| (job, true, gpus >= 2));
    let on_gpus = ON_GPUS.map(|job| (job, true, gpus >= 2 && !emulated));
    let without = WITHOUT_CUDA.map(|job| (job, false, emulated && !has_cuda_libraries()));
    let all = anywhere.into_iter().chain(on_gpus).chain(without);
    let mut trials: Vec<_> =
        all.map(|((line, texts), succeeds, fits)| trial(line, texts, succeeds, fits)).collect();
    let wrong = Trial::test("programs/wrong_data", wrong_data);
    trials.push(wrong.with_ignored_flag(!emulated || built("phalanx").is_none()));
    trials
}

/// A library that calculates wrong: `perf` counts it and fails, and does not where nothing is checked.
fn wrong_data() -> Result<(), Failed> {
    let program = built("phalanx").ok_or("phalanx is not built: cargo build --workspace --bins")?;
    let emulated = Emulated::new()?.set("WRONG", 6);
    let perf = |arguments: &str| -> Result<(bool, String), Failed> {
        let mut command = emulated.command(&program);
        let line = format!("perf all_reduce -t 2 -b 4K -e 4K -n 2 -w 1 {arguments}");
        let output = command.args(line.split(' ')).env("PHALANX_TIMEOUT", "60").output()?;
        let text =
            format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        Ok((output.status.success(), text))
    };
    for (arguments, succeeds) in [("-d f16", false), ("-d f32", true), ("-d f16 -c 0", true)] {
        let (succeeded, text) = perf(arguments)?;
        let told = text.lines().find(|line| line.contains("Out of bounds values")).unwrap_or_default();
        let is_told = succeeds || !told.is_empty() && !told.contains(" 0 OK");
        if succeeded != succeeds || !is_told {
            return Err(
                format!("{arguments}: success is {succeeded}, expected {succeeds}, in\n{text}").into()
            );
        }
    }
    Ok(())
}

fn has_cuda_libraries() -> bool {
    // SAFETY: the libraries' initialisers do nothing of note.
    ["libcublas.so", "libnvrtc.so"].iter().any(|name| unsafe { libloading::Library::new(*name) }.is_ok())
}

fn trial(line: &'static str, texts: &'static [&'static str], succeeds: bool, fits: bool) -> Trial {
    let missing = line.split(' ').find(|word| is_program(word) && built(word).is_none());
    let is_ci = std::env::var("CI").is_ok_and(|value| value == "true");
    let trial = Trial::test(format!("programs/{line}"), move || perform(line, texts, succeeds));
    match missing {
        Some(name) if !is_ci => trial.with_ignored_flag(true).with_kind(format!("{name} is not built")),
        _ => trial.with_ignored_flag(!fits),
    }
}

fn is_program(word: &str) -> bool {
    let lines = ANYWHERE.iter().chain(&ON_GPUS).map(|(line, _)| *line);
    word == "phalanx" || lines.filter_map(|line| line.split(' ').next()).any(|name| name == word)
}

/// The file of a program, near this one.
pub fn built(name: &str) -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    let near = own.ancestors().skip(1).take(2);
    let mut places = near.flat_map(|folder| [folder.join("examples").join(name), folder.join(name)]);
    places.find(|path| path.is_file())
}

fn perform(line: &str, texts: &[&str], succeeds: bool) -> Result<(), Failed> {
    let program = |word: &str| -> Result<PathBuf, Failed> {
        if !is_program(word) {
            return Ok(word.into());
        }
        Ok(built(word)
            .ok_or_else(|| format!("{word} is not built: cargo build --workspace --examples --bins"))?)
    };
    let words = line.split(' ').map(program).collect::<Result<Vec<_>, _>>()?;
    let mut command = Command::new(&words[0]);
    let output = command.args(&words[1..]).env("PHALANX_TIMEOUT", "60").output()?;
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.success() == succeeds && texts.iter().all(|part| text.contains(part)) {
        return Ok(());
    }
    Err(format!("{}, expected {texts:?} in\n{text}", output.status).into())
}
