//! MPI: one table of functions for every implementation.
//!
//! Implementations differ in the values and sizes of handles and constants: see [`Flavour`]. A [`Handle`] is as wide as a
//! pointer, but MPICH's handles are C `int`s:
//! - passed by value, MPICH reads the lower half of the register or stack slot;
//! - written through a pointer, the upper half keeps its value.
//!
//! A handle that MPI writes therefore starts as [`Handle::ZERO`], and this module needs a little-endian 64-bit machine.

mod flavour;
mod functions;
mod search;

pub use flavour::{Constants, Flavour};
pub use functions::{FileFunctions, Functions, Handle, Status, UserFunction};
pub use search::{launcher_process, places};

use crate::{Library, LoadError, MissingFunction};

/// A loaded MPI library, not initialised.
#[derive(Debug)]
pub struct Mpi {
    /// The library.
    pub library: Library,
    /// The family of its handles.
    pub flavour: Flavour,
    /// The predefined handles and constants.
    pub constants: Constants,
    /// The functions.
    pub functions: Functions,
    /// The functions of MPI-IO, if the library has them.
    pub file_functions: Option<FileFunctions>,
    /// The library's name and version: the first line of `MPI_Get_library_version`.
    pub version: String,
}

impl Mpi {
    /// Loads the MPI that fits this process's launcher (see [`places`]).
    ///
    /// # Errors
    /// [`LoadError`] with the places that were tried, or the missing function.
    pub fn load() -> Result<Mpi, LoadError> {
        let library = search::SEARCH.open_among(places())?;
        let version = version(&library);
        let missing = |function: &'static str| MissingFunction {
            function,
            library: "MPI",
            version: version.clone(),
            path: library.path().to_owned(),
        };
        let flavour = Flavour::of(&library);
        let constants = Constants::new(flavour, &library).map_err(missing)?;
        let functions = Functions::load(&library).map_err(missing)?;
        let file_functions = FileFunctions::load(&library);
        Ok(Mpi { flavour, constants, functions, file_functions, version, library })
    }
}

fn version(library: &Library) -> String {
    // SAFETY: the function has this type in every MPI since version 3.
    let get: Option<functions::GetText> = unsafe { library.symbol(c"MPI_Get_library_version") };
    let text = get.map(|get| {
        // SAFETY: the function may be called before MPI is initialised.
        functions::text(|buffer, length| unsafe { get(buffer, length) })
    });
    let first_line = |text: String| text.lines().next().unwrap_or_default().trim().to_owned();
    text.map(first_line).filter(|text| !text.is_empty()).unwrap_or_else(|| "of unknown version".to_owned())
}
