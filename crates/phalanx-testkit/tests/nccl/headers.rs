//! The bindings against a header: a C program, compiled with it, prints what it says of every item; the same list
//! is made of the bindings.

use crate::release::Release;
use phalanx_sys::nccl::*;
use std::collections::BTreeSet;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;

/// An item of the header: a C expression, and what it is in the bindings.
type Item = (String, i64);

/// What the C program needs beside `nccl.h`: the headers that it includes, and the types that it takes from them.
const CUDA_HEADERS: [(&str, &str); 3] = [
    ("cuda_runtime.h", "typedef struct CUstream_st *cudaStream_t; typedef struct CUevent_st *cudaEvent_t;\n"),
    // Older headers name bf16 only where CUDA has it.
    ("cuda_fp16.h", "#define __CUDA_BF16_TYPES_EXIST__ 1\n"),
    ("cuda_bf16.h", ""),
];

/// Functions that phalanx has no use for: single parameters, which can be had as text.
const UNBOUND: [&str; 12] = [
    "ncclParamBind",
    "ncclParamGet",
    "ncclParamGetI8",
    "ncclParamGetI16",
    "ncclParamGetI32",
    "ncclParamGetI64",
    "ncclParamGetU8",
    "ncclParamGetU16",
    "ncclParamGetU32",
    "ncclParamGetU64",
    "ncclParamGetStr",
    // Its declaration is followed by a macro of the same name.
    "ncclResetDebugInit",
];

/// Sizes, offsets, values and types of functions.
pub fn agree_with_the_bindings(release: &Release) -> Result<(), String> {
    let items = items(release.version);
    let found = evaluate(release, &items)?;
    let mut differences: Vec<String> = items
        .iter()
        .zip(&found)
        .filter(|((_, ours), theirs)| ours != *theirs)
        .map(|((expression, ours), theirs)| format!("{expression} is {theirs}, and {ours} here"))
        .collect();
    differences.extend(functions_that_differ(release)?);
    if differences.is_empty() { Ok(()) } else { Err(differences.join("\n")) }
}

/// What is wrong is noticed: a size, an offset, a value, a function's argument.
pub fn notices_differences(release: &Release) -> Result<(), String> {
    let wrong_type =
        c_function("fn(*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, stream_t) -> ncclResult_t");
    let items = [
        ("sizeof(ncclUniqueId)".into(), 64),
        ("offsetof(ncclConfig_t, maxCTAs)".into(), 24),
        ("ncclMax".into(), 3),
        (format!("__builtin_types_compatible_p(__typeof__(ncclSend), {wrong_type})"), 1),
    ];
    let found = evaluate(release, &items)?;
    if found == [128, 28, 2, 0] { Ok(()) } else { Err(format!("{found:?}")) }
}

/// Everything in the bindings that this version has.
fn items(version: u32) -> Vec<Item> {
    let mut items = structures(version);
    items.extend(values(version));
    let functions = FUNCTIONS.iter().filter(|function| is_compared(function, version));
    items.extend(functions.map(|function| {
        let ty = c_function(function.signature);
        (format!("__builtin_types_compatible_p(__typeof__({}), {ty})", function.name), 1)
    }));
    items
}

fn is_compared(function: &Function, version: u32) -> bool {
    function.since <= version && function.is_of(Flavour::Nccl) && !UNBOUND.contains(&function.name)
}

fn structures(version: u32) -> Vec<Item> {
    let mut items = vec![
        size::<ncclUniqueId>("ncclUniqueId"),
        size::<ncclResult_t>("ncclResult_t"),
        size::<ncclDataType_t>("ncclDataType_t"),
        size::<ncclRedOp_t>("ncclRedOp_t"),
        size::<ncclComm_t>("ncclComm_t"),
    ];
    let config = ncclConfig_t::for_version(version).expect("every supported version has a configuration");
    items.push(("sizeof(ncclConfig_t)".into(), config.size as i64));
    items.push(("((ncclConfig_t)NCCL_CONFIG_INITIALIZER).magic".into(), i64::from(config.magic)));
    items.push(("((ncclConfig_t)NCCL_CONFIG_INITIALIZER).blocking".into(), i64::from(UNDEF_INT)));
    macro_rules! offsets {
        ($ty:ident: $($field:ident)*) => {
            [$((stringify!($field), offset_of!($ty, $field))),*]
                .map(|(field, offset)| (format!("offsetof({}, {field})", stringify!($ty)), offset as i64))
        };
    }
    let fields = offsets!(ncclConfig_t: size magic version blocking cgaClusterSize minCTAs maxCTAs netName splitShare
        trafficClass commName collnetEnable CTAPolicy shrinkShare nvlsCTAs nChannelsPerNetPeer nvlinkCentricSched
        graphUsageMode numRmaCtx maxP2pPeers graphStreamOrdering launchOrderImplicit numRmaSig rmaEagerInit
        hostCftMode nvlsHostMode);
    let used =
        CONFIG_LAYOUTS.into_iter().rfind(|(since, ..)| *since <= version).map_or(0, |(_, used, _)| used);
    items.extend(fields.into_iter().filter(|(_, offset)| *offset < used as i64));
    if let Some(config) = ncclCollConfig_t::for_version(version) {
        let initial = "((ncclCollConfig_t)NCCL_COLLCONFIG_INITIALIZER)";
        items.push(("sizeof(ncclCollConfig_t)".into(), config.size as i64));
        items.push((format!("{initial}.magic"), i64::from(config.magic)));
        items.push((format!("{initial}.minCTAs"), i64::from(config.minCTAs)));
        items.push((format!("{initial}.forceAlgSelection"), i64::from(config.forceAlgSelection)));
        let fields = offsets!(ncclCollConfig_t: size magic version ext minCTAs maxCTAs nvlsCTAs cgaClusterSize
            algSelection forceAlgSelection CTAPolicy userProfilerTag launchCompletionEvent);
        items.extend(fields.into_iter().filter(|(_, offset)| *offset < config.size as i64));
    }
    if version >= version_code(2, 32, 0) {
        items.push(size::<ncclEncryptionConfig_t>("ncclEncryptionConfig_t"));
        items.extend(offsets!(ncclEncryptionConfig_t: size magic version mode psk));
        let magic = ncclEncryptionConfig_t::new(NCCL_ENCRYPTION_MODE_PSK, std::ptr::null()).magic;
        let initial = "((ncclEncryptionConfig_t)NCCL_ENCRYPTION_CONFIG_INITIALIZER).magic";
        items.push((initial.into(), i64::from(magic)));
    }
    if version >= version_code(2, 22, 3) {
        items.push(size::<ncclSimInfo_t>("ncclSimInfo_t"));
        items.extend(offsets!(ncclSimInfo_t: size magic version estimatedTime));
        let magic = ncclSimInfo_t::new().magic;
        items.push(("((ncclSimInfo_t)NCCL_SIM_INFO_INITIALIZER).magic".into(), i64::from(magic)));
    }
    if version >= version_code(2, 29, 2) {
        items.push(size::<ncclWaitSignalDesc_t>("ncclWaitSignalDesc_t"));
        items.extend(offsets!(ncclWaitSignalDesc_t: opCnt peer sigIdx ctx));
    }
    items
}

fn size<T>(name: &str) -> Item {
    (format!("sizeof({name})"), size_of::<T>() as i64)
}

fn values(version: u32) -> Vec<Item> {
    macro_rules! codes {
        ($ty:ident, $prefix:literal: $($name:ident since $minor:literal $patch:literal)*) => {
            [$((concat!($prefix, stringify!($name)), i64::from($ty::$name.0), version_code(2, $minor, $patch))),*]
        };
    }
    let results = codes!(ncclResult_t, "nccl": Success since 0 0 UnhandledCudaError since 0 0 SystemError since 0 0
        InternalError since 0 0 InvalidArgument since 0 0 InvalidUsage since 0 0 RemoteError since 13 4
        InProgress since 14 3 Timeout since 30 3);
    let types = codes!(ncclDataType_t, "nccl": Int8 since 0 0 Uint8 since 0 0 Int32 since 0 0 Uint32 since 0 0
        Int64 since 0 0 Uint64 since 0 0 Float16 since 0 0 Float32 since 0 0 Float64 since 0 0 Bfloat16 since 10 3
        Float8e4m3 since 24 3 Float8e5m2 since 24 3);
    let always = 0;
    let since = |minor, patch| version_code(2, minor, patch);
    let others = [
        ("ncclSum", red_op::Sum, always),
        ("ncclProd", red_op::Prod, always),
        ("ncclMax", red_op::Max, always),
        ("ncclMin", red_op::Min, always),
        ("ncclAvg", red_op::Avg, always),
        ("ncclScalarDevice", ncclScalarDevice, always),
        ("ncclScalarHostImmediate", ncclScalarHostImmediate, always),
        ("NCCL_UNIQUE_ID_BYTES", NCCL_UNIQUE_ID_BYTES as i32, always),
        ("NCCL_CONFIG_UNDEF_INT", UNDEF_INT, always),
        ("NCCL_SPLIT_NOCOLOR", NCCL_SPLIT_NOCOLOR, since(18, 1)),
        ("NCCL_WIN_DEFAULT", NCCL_WIN_DEFAULT, since(27, 3)),
        ("NCCL_WIN_COLL_SYMMETRIC", NCCL_WIN_COLL_SYMMETRIC, since(27, 3)),
        ("NCCL_WIN_STRICT_ORDERING", NCCL_WIN_STRICT_ORDERING, since(29, 2)),
        ("NCCL_WIN_REQUIRED_ALIGNMENT", NCCL_WIN_REQUIRED_ALIGNMENT as i32, since(28, 3)),
        ("NCCL_SHRINK_DEFAULT", NCCL_SHRINK_DEFAULT, since(27, 3)),
        ("NCCL_SHRINK_ABORT", NCCL_SHRINK_ABORT, since(27, 3)),
        ("NCCL_ENCRYPTION_MODE_NONE", NCCL_ENCRYPTION_MODE_NONE, since(32, 0)),
        ("NCCL_ENCRYPTION_MODE_PSK", NCCL_ENCRYPTION_MODE_PSK, since(32, 0)),
        ("NCCL_SUSPEND_MEM", NCCL_SUSPEND_MEM, since(29, 7)),
        ("ncclStatGpuMemSuspend", mem_stat::GpuMemSuspend, since(29, 7)),
        ("ncclStatGpuMemSuspended", mem_stat::GpuMemSuspended, since(29, 7)),
        ("ncclStatGpuMemPersist", mem_stat::GpuMemPersist, since(29, 7)),
        ("ncclStatGpuMemTotal", mem_stat::GpuMemTotal, since(29, 7)),
    ]
    .map(|(name, value, since)| (name, i64::from(value), since));
    let all = results.into_iter().chain(types).chain(others);
    all.filter(|(.., since)| *since <= version).map(|(name, value, _)| (name.into(), value)).collect()
}

/// The C type of a Rust function's: `fn(*const c_void, usize) -> ncclResult_t`.
fn c_function(signature: &str) -> String {
    let (arguments, answer) = signature.split_once(')').expect("a function's type");
    let arguments = arguments.trim_start_matches("fn").trim_start_matches('(');
    let arguments: Vec<String> =
        arguments.split(',').map(str::trim).filter(|ty| !ty.is_empty()).map(c_type).collect();
    let arguments = if arguments.is_empty() { "void".into() } else { arguments.join(", ") };
    let answer = answer.trim().strip_prefix("->").map_or("void".into(), c_type);
    format!("{answer}({arguments})")
}

fn c_type(rust: &str) -> String {
    let rust = rust.trim();
    if let Some(target) = rust.strip_prefix("*mut ") {
        return format!("{} *", c_type(target));
    }
    if let Some(target) = rust.strip_prefix("*const ") {
        return format!("{} const *", c_type(target));
    }
    match rust {
        "c_void" => "void",
        "c_char" => "char",
        "c_int" => "int",
        "c_uint" => "unsigned int",
        "usize" => "size_t",
        "u64" => "uint64_t",
        "stream_t" => "cudaStream_t",
        // The names of NCCL's own types are the same.
        name => name,
    }
    .into()
}

/// What the expressions are where this header is included.
fn evaluate(release: &Release, items: &[Item]) -> Result<Vec<i64>, String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let path = |name: &str| folder.path().join(name);
    let write = |path: &Path, text: &str| std::fs::write(path, text).map_err(|error| error.to_string());
    for (name, text) in CUDA_HEADERS {
        write(&path(name), text)?;
    }
    let mut source = String::from(
        "#define NCCL_OS_LINUX 1\n#include <stddef.h>\n#include <stdio.h>\n#include <stdint.h>\n#include <nccl.h>\nint main(void) {\n",
    );
    for (expression, _) in items {
        source += &format!("  printf(\"%lld\\n\", (long long)({expression}));\n");
    }
    source += "  return 0;\n}\n";
    write(&path("items.c"), &source)?;

    let compiled = run(Command::new("cc")
        .args(["-std=gnu11", "-I"])
        .args([folder.path(), Path::new("-I"), &release.include(), &path("items.c"), Path::new("-o")])
        .arg(path("items")))?;
    drop(compiled);
    let printed = run(&mut Command::new(path("items")))?;
    let found: Vec<i64> = printed.lines().filter_map(|line| line.parse().ok()).collect();
    if found.len() == items.len() { Ok(found) } else { Err(format!("{} lines: {printed}", found.len())) }
}

/// A command's output, or its errors.
fn run(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("{:?}: {error}", command.get_program()))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(format!(
        "{:?}: {}\n{}",
        command.get_program(),
        output.status,
        String::from_utf8_lossy(&output.stderr)
    ))
}

/// Functions that the header has and the bindings have not, and the other way round.
fn functions_that_differ(release: &Release) -> Result<Vec<String>, String> {
    let header = release.header_text()?;
    let declared: BTreeSet<&str> = header.lines().filter_map(declared_function).collect();
    let bound: BTreeSet<&str> =
        FUNCTIONS.iter().filter(|function| is_compared(function, release.version)).map(|f| f.name).collect();
    let later: BTreeSet<&str> =
        FUNCTIONS.iter().filter(|f| f.since > release.version).map(|f| f.name).collect();
    let unbound = declared.iter().filter(|name| !bound.contains(*name) && !UNBOUND.contains(name));
    let mut differences: Vec<String> = unbound
        .map(|name| match later.contains(name) {
            true => format!("{name} is said to have come later"),
            false => format!("{name} has no binding"),
        })
        .collect();
    differences.extend(bound.difference(&declared).map(|name| format!("{name} is not in the header")));
    Ok(differences)
}

/// The function that a line declares: its answer's type and its name are on one line.
fn declared_function(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let answers = ["ncclResult_t", "const char*", "void"];
    let rest = answers.iter().find_map(|answer| line.strip_prefix(answer))?.trim_start();
    let (name, _) = rest.split_once('(')?;
    name.starts_with("nccl").then_some(name)
}
