//! Tests of `phalanx completions` and `phalanx manual`.

mod common;

use common::{phalanx, say};
use std::process::Command;

const COMMANDS: [&str; 5] = ["perf", "plan", "launch", "doctor", "trace"];

#[test]
fn shells_complete_commands_and_options() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let said = say(phalanx(&format!("completions {shell}")));
        assert_eq!((said.code, said.stderr.as_str()), (Some(0), ""), "{shell}");
        for word in COMMANDS.iter().chain(&["report-bindings", "maxbytes"]) {
            assert!(said.stdout.contains(word), "{shell} does not know {word}");
        }
        assert!(!said.stdout.contains("host-rank"), "{shell} knows what is not for users");
    }
}

#[test]
fn bash_completes_a_command() {
    let script = say(phalanx("completions bash")).stdout;
    let ask = format!(
        "{script}\nCOMP_WORDS=(phalanx doc) COMP_CWORD=1\n_phalanx phalanx doc phalanx\necho \"${{COMPREPLY[@]}}\""
    );
    let said = Command::new("bash").args(["-c", &ask]).output().unwrap();
    assert_eq!(
        String::from_utf8(said.stdout).unwrap().trim(),
        "doctor",
        "{}",
        String::from_utf8_lossy(&said.stderr)
    );
}

#[test]
fn each_command_has_a_page() {
    let folder = tempfile::tempdir().unwrap();
    let said = say(phalanx(&format!("manual {}/man1", folder.path().display())));
    assert_eq!((said.code, said.stdout.as_str(), said.stderr.as_str()), (Some(0), "", ""));
    let names = COMMANDS.iter().map(|command| format!("phalanx-{command}")).chain(["phalanx".to_owned()]);
    for name in names {
        let page = std::fs::read_to_string(folder.path().join(format!("man1/{name}.1"))).unwrap();
        assert!(page.contains(&format!(".TH {name} 1")), "{page}");
        assert!(page.contains(".SH SYNOPSIS") && page.contains("Example"), "{page}");
    }
    let hidden = std::fs::read_dir(folder.path().join("man1")).unwrap().count();
    assert_eq!(
        hidden,
        COMMANDS.len() + 3,
        "a page for the program, completions and manual, none for what is hidden"
    );
}
