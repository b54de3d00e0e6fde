//! Code that does not compile or link.

use std::fmt;

crate::types::error::debug_is_the_message!(CompileError);

/// Code for a GPU does not compile or link, or the compiler refuses a setting.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub struct CompileError {
    /// Name of the program.
    pub program: String,
    /// The step that failed.
    pub step: BuildStep,
    /// The library's name and version.
    pub library: String,
    /// The errors, each with its place in the source.
    pub diagnostics: Vec<Diagnostic>,
    /// The library's whole log.
    pub log: String,
    /// Headers that were not found and that the code may need, with the places that were searched.
    pub missing: Vec<String>,
}

/// A step of building code for a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BuildStep {
    /// Compiling with NVRTC.
    Compile,
    /// Linking with nvJitLink.
    Link,
}

/// An error of the compiler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnostic {
    /// The file: the program's name, or a header.
    pub file: String,
    /// The line, from 1.
    pub line: usize,
    /// What is wrong.
    pub message: String,
    /// The text of the line, if it is the program's.
    pub source: Option<String>,
}

impl fmt::Display for CompileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let done = match self.step {
            BuildStep::Compile => "compile",
            BuildStep::Link => "link",
        };
        write!(f, "{} does not {done} ({})", self.program, self.library)?;
        for diagnostic in &self.diagnostics {
            write!(f, "\n{diagnostic}")?;
        }
        if self.diagnostics.is_empty() {
            write!(f, ": {}", self.log.trim())?;
        }
        self.missing.iter().try_for_each(|missing| write!(f, "\nnote: {missing}"))
    }
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.message)?;
        match &self.source {
            Some(source) => write!(f, "\n    {}", source.trim()),
            None => Ok(()),
        }
    }
}

/// The errors in a log of NVRTC, whose lines are `FILE(LINE): error: MESSAGE`, or `error #20: MESSAGE`.
pub(crate) fn diagnostics(log: &str, program: &str, source: &str) -> Vec<Diagnostic> {
    log.lines().filter_map(|line| diagnostic(line, program, source)).collect()
}

fn diagnostic(line: &str, program: &str, source: &str) -> Option<Diagnostic> {
    let (place, message) = line.split_once("): ")?;
    let (kind, message) = message.split_once(": ")?;
    let is_error = kind.split_whitespace().any(|word| word == "error");
    let (file, line) = place.rsplit_once('(').filter(|_| is_error)?;
    let line = line.parse().ok()?;
    let text = || source.lines().nth(line - 1).map(str::to_owned);
    Some(Diagnostic {
        file: file.to_owned(),
        line,
        message: message.to_owned(),
        source: if file == program && line > 0 { text() } else { None },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_found_in_the_log() {
        let log = "ring.cu(2): error: identifier \"foo\" is undefined\n      x = foo;\n          ^\n\n\
                   ring.cu(1): warning #177-D: variable \"y\" was declared but never referenced\n\
                   /usr/include/a.h(70): catastrophic error: cannot open source file \"b.h\"\n\
                   ring.cu(9): error #20: late\n\
                   1 error detected in the compilation of \"ring.cu\".\n";
        let found = diagnostics(log, "ring.cu", "int y;\n  x = foo;\n");
        let text: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(
            text,
            [
                "ring.cu:2: identifier \"foo\" is undefined\n    x = foo;",
                "/usr/include/a.h:70: cannot open source file \"b.h\"",
                "ring.cu:9: late",
            ]
        );
    }
}
