//! MPI: one table of functions for every implementation.
//!
//! What differs between implementations is the values and sizes of handles and constants, see [`Flavour`].
//! A [`Handle`] is as wide as a pointer. MPICH's handles are C `int`s: passed by value, the callee looks at the
//! lower half of the register or stack slot; written through a pointer, the upper half stays as it was. So a handle
//! that MPI writes starts as [`Handle::ZERO`], and this module needs a little-endian 64-bit machine.

mod flavour;
mod functions;
mod search;

pub use flavour::{Constants, Flavour};
pub use functions::{Functions, Handle, Status, UserFunction};
pub use search::{launcher_process, places};

use crate::library::{Library, MissingFunction, NotFound};

/// A loaded MPI library. Nothing has been initialised.
#[derive(Debug)]
pub struct Mpi {
    /// The file.
    pub library: Library,
    /// Which handles it has.
    pub flavour: Flavour,
    /// Its handles and constants.
    pub constants: Constants,
    /// Its functions.
    pub functions: Functions,
    /// Its own name and version, the first line of `MPI_Get_library_version`.
    pub version: String,
}

/// Why there is no MPI.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// No library.
    #[error(transparent)]
    NotFound(#[from] NotFound),
    /// A library that is no MPI 3, or an MPI for another kind of machine.
    #[error(transparent)]
    MissingFunction(#[from] MissingFunction),
}

impl Mpi {
    /// Finds the MPI that fits the launcher of this process (see [`places`]) and loads it.
    ///
    /// # Errors
    /// [`LoadError`], with every place that was tried.
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
        Ok(Mpi { flavour, constants, functions, version, library })
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
