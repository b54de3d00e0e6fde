//! Trials that are processes which find the emulator.

use libtest_mimic::{Failed, Trial};
use phalanx_testkit::emulated::Emulated;
use phalanx_testkit::processes::{Ended, Launch, describe};
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

/// A process that takes longer hangs.
const DEADLINE: Duration = Duration::from_secs(60);

/// Settings of the emulator.
pub type Settings = &'static [(&'static str, &'static str)];

/// The emulator with settings.
pub fn emulated(settings: Settings) -> io::Result<Emulated> {
    Ok(settings.iter().fold(Emulated::new()?, |emulated, (name, value)| emulated.set(name, value)))
}

fn run(emulated: &Emulated, scenario: &str, args: &[String]) -> Result<Ended, String> {
    let launch = emulated.launch(Launch::alone(scenario)).deadline(DEADLINE);
    let launch = args.iter().fold(launch, Launch::arg);
    launch.run()?.pop().ok_or_else(|| "no process was started".to_owned())
}

/// A process that must report success, for each of some seeds.
pub fn succeeds(name: &str, settings: Settings, scenario: &'static str, args: &[&str]) -> Trial {
    let args: Vec<String> = args.iter().map(ToString::to_string).collect();
    Trial::test(name, move || {
        for seed in 0..3 {
            let emulated = emulated(settings)?.set("SEED", seed);
            let ended = run(&emulated, scenario, &args)?;
            if ended.outcome.is_err() {
                return Err(Failed::from(format!("with seed {seed}: {}", describe(&[ended]))));
            }
        }
        Ok(())
    })
}

/// A process that must end with a violation whose text has these parts.
pub fn violates(
    name: &str,
    settings: Settings,
    scenario: &'static str,
    parts: &'static [&'static str],
) -> Trial {
    Trial::test(name, move || {
        const SIGABRT: i32 = 6;
        let ended = run(&emulated(settings)?, scenario, &[])?;
        let text = ended.output.lines().find(|line| line.starts_with("EMULATED VIOLATION"));
        let said = text.is_some_and(|text| parts.iter().all(|part| text.contains(part)));
        if said && ended.status.and_then(|status| status.signal()) == Some(SIGABRT) {
            return Ok(());
        }
        Err(Failed::from(format!("no violation that says {parts:?}: {}", describe(&[ended]))))
    })
}

/// A process that must end with a signal.
pub fn crashes(name: &str, settings: Settings, scenario: &'static str, signal: i32) -> Trial {
    Trial::test(name, move || {
        let ended = run(&emulated(settings)?, scenario, &[])?;
        if ended.status.and_then(|status| status.signal()) == Some(signal) {
            return Ok(());
        }
        Err(Failed::from(format!("no end by signal {signal}: {}", describe(&[ended]))))
    })
}
