//! `phalanx completions` and `phalanx manual`: what shells and man(1) need to know of this program.

use crate::cli::Cli;
use anyhow::{Context, Result};
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Print what a shell needs to complete this program's command lines.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  phalanx completions bash > ~/.local/share/bash-completion/completions/phalanx\n  phalanx completions fish > ~/.config/fish/completions/phalanx.fish"
)]
pub struct CompletionsArgs {
    /// The shell.
    pub shell: Shell,
}

/// Write the manual pages of this program and its commands into a folder.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  phalanx manual ~/.local/share/man/man1 && man phalanx-perf")]
pub struct ManualArgs {
    /// The folder, which is made if it is not there.
    pub folder: PathBuf,
}

pub fn complete(args: &CompletionsArgs) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "phalanx", &mut script);
    io::stdout().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}

/// A page for the program and one for each command: `phalanx.1`, `phalanx-perf.1`.
pub fn write(args: &ManualArgs) -> Result<ExitCode> {
    let folder = &args.folder;
    std::fs::create_dir_all(folder)
        .with_context(|| format!("cannot make the folder {}", folder.display()))?;
    let program = Cli::command().disable_help_subcommand(true);
    page(folder, program.clone(), "phalanx")?;
    for command in program.get_subcommands().filter(|command| !command.is_hide_set()) {
        page(folder, command.clone(), &format!("phalanx-{}", command.get_name()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn page(folder: &Path, command: Command, name: &str) -> Result<()> {
    let file = folder.join(format!("{name}.1"));
    let command =
        command.name(name.to_owned()).bin_name(name.replacen('-', " ", 1)).version(env!("CARGO_PKG_VERSION"));
    let mut text = Vec::new();
    clap_mangen::Man::new(command).render(&mut text)?;
    std::fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))
}
