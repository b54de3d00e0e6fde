//! The bindings against a header: a program, compiled with it, prints what it says of every item; the same
//! list is made of the bindings. `nccl.h` is C; the device API's headers are C++, in all releases but a few.

use super::release::Release;
use phalanx_sys::nccl::*;
use std::collections::BTreeSet;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;

/// An item of the header: a C expression, and what it is in the bindings.
type Item = (String, i64);

/// What the C program needs beside `nccl.h`: the headers that it includes, and the types that it takes from
/// them.
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

/// Functions of the device API's headers that the library does not have: two are Windows', one is declared
/// only.
const UNBOUND_OF_DEVICES: [&str; 3] =
    ["ncclGinOutboxCreateRequirement", "ncclGinInboxA2ACreateRequirement", "ncclCftBarrierCreateRequirement"];

/// Which of the headers, and with it which language.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Header {
    Nccl,
    Device,
}

/// What the device API's headers need beside those of CUDA.
const DRIVER_HEADER: (&str, &str) = ("cuda.h", "typedef int CUmemLocationType;\n");

/// Sizes, offsets, values and types of functions.
pub fn agree_with_the_bindings(release: &Release) -> Result<(), String> {
    let of_devices = declared_for_devices(release)?;
    let mut differences = Vec::new();
    for header in [Header::Nccl, Header::Device] {
        if header == Header::Device && of_devices.is_empty() {
            continue;
        }
        let items = items(release.version, header, &of_devices);
        let found = evaluate(release, header, &items)?;
        let compared = items.iter().zip(&found).filter(|((_, ours), theirs)| ours != *theirs);
        differences.extend(
            compared.map(|((expression, ours), theirs)| format!("{expression} is {theirs}, and {ours} here")),
        );
    }
    differences.extend(functions_that_differ(release, &of_devices)?);
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
    let found = evaluate(release, Header::Nccl, &items)?;
    if found != [128, 28, 2, 0] {
        return Err(format!("{found:?}"));
    }
    if declared_for_devices(release)?.is_empty() {
        return Ok(());
    }
    let items = [
        ("sizeof(ncclTeam_t)".into(), 16),
        ("offsetof(ncclDevResourceRequirements_t, bufferAlign)".into(), 24),
        (same_type("ncclLLA2ACalcSlots", "fn(c_int, usize) -> c_int", Header::Device), 1),
        (same_type("ncclTeamRankToLsa", "fn(ncclComm_t, ncclTeam_t, c_int) -> c_int", Header::Device), 1),
    ];
    let found = evaluate(release, Header::Device, &items)?;
    if found == [12, 16, 0, 1] { Ok(()) } else { Err(format!("for devices: {found:?}")) }
}

/// Everything in the bindings that this version has in a header.
fn items(version: u32, header: Header, of_devices: &BTreeSet<String>) -> Vec<Item> {
    let mut items = match header {
        Header::Nccl => [structures(version), values(version)].concat(),
        Header::Device => [device_structures(version), device_values(version)].concat(),
    };
    let is_there = |function: &&Function| of_devices.contains(function.name) == (header == Header::Device);
    let functions = FUNCTIONS.iter().filter(|function| is_compared(function, version)).filter(is_there);
    items.extend(functions.map(|function| (same_type(function.name, function.signature, header), 1)));
    items
}

/// An expression that is 1 if a function has this type. In C++ there may be others of its name.
fn same_type(function: &str, signature: &str, header: Header) -> String {
    let ty = c_function(signature);
    match header {
        Header::Nccl => format!("__builtin_types_compatible_p(__typeof__({function}), {ty})"),
        Header::Device => format!("sizeof(is_there<{ty}>({function})) - 1"),
    }
}

fn is_compared(function: &Function, version: u32) -> bool {
    function.since <= version && function.is_of(Flavour::Nccl) && !UNBOUND.contains(&function.name)
}

/// Offsets of fields, as C says them.
macro_rules! offsets {
    ($ty:ident: $($field:ident)*) => {
        [$((stringify!($field), offset_of!($ty, $field))),*]
            .map(|(field, offset)| (format!("offsetof({}, {field})", stringify!($ty)), offset as i64))
    };
}

fn device_structures(version: u32) -> Vec<Item> {
    let requirements =
        ncclDevCommRequirements_t::for_version(version).expect("every version that has the header");
    let since = |minor, patch| version >= version_code(2, minor, patch);
    let mut items = vec![
        size::<ncclTeam_t>("ncclTeam_t"),
        size::<ncclMultimemHandle_t>("ncclMultimemHandle_t"),
        size::<ncclLsaBarrierHandle_t>("ncclLsaBarrierHandle_t"),
        size::<ncclLLA2AHandle_t>("ncclLLA2AHandle_t"),
        size::<ncclTeamRequirements_t>("ncclTeamRequirements_t"),
        ("sizeof(ncclDevComm)".into(), dev_comm_size(version) as i64),
        ("sizeof(ncclDevResourceRequirements_t)".into(), ncclDevResourceRequirements_t::size(version) as i64),
    ];
    items.extend(offsets!(ncclTeam_t: nRanks rank stride));
    items.extend(offsets!(ncclMultimemHandle_t: mcBasePtr));
    items.extend(offsets!(ncclLsaBarrierHandle_t: bufHandle nBarriers));
    items.extend(offsets!(ncclLLA2AHandle_t: bufHandle nSlots));
    items.extend(offsets!(ncclTeamRequirements_t: next team multimem outMultimemHandle));
    items.extend(offsets!(ncclDevResourceRequirements_t: next bufferSize bufferAlign outBufferHandle));
    if !since(28, 7) {
        items.push((
            "sizeof(ncclDevCommRequirements_t)".into(),
            size_of::<ncclDevCommRequirements_v22803_t>() as i64,
        ));
        let fields = offsets!(ncclDevCommRequirements_v22803_t: resourceRequirementsList teamRequirementsList
            lsaMultimem lsaBarrierCount);
        items.extend(fields.map(|(expression, offset)| (expression.replace("_v22803", ""), offset)));
        return items;
    }
    items.push(size::<ncclGinBarrierHandle_t>("ncclGinBarrierHandle_t"));
    items.extend(offsets!(ncclGinBarrierHandle_t: signal0));
    items.extend(offsets!(ncclDevResourceRequirements_t: ginSignalCount ginCounterCount outGinSignalStart
        outGinCounterStart));
    // What comes before is not there.
    let start = ncclDevCommRequirements_t::start(version);
    items.push(("sizeof(ncclDevCommRequirements_t)".into(), (requirements.size - start) as i64));
    let fields = offsets!(ncclDevCommRequirements_t: size magic version resourceRequirementsList teamRequirementsList
        lsaMultimem barrierCount lsaBarrierCount railGinBarrierCount lsaLLA2ABlockCount lsaLLA2ASlotCount
        ginForceEnable ginContextCount ginSignalCount ginCounterCount ginConnectionType ginExclusiveContexts
        ginQueueDepth ginTrafficClass worldGinBarrierCount ginStrongSignalsRequired ginVaSignalsRequired
        ginCustomStride ginType useRuntimeVersion cftCaps cftBarrierCount);
    let used = ncclDevCommRequirements_t::used(version);
    let there = fields.into_iter().filter(|(_, offset)| (start..used).contains(&(*offset as usize)));
    items.extend(there.map(|(expression, offset)| (expression, offset - start as i64)));
    let Some(properties) = ncclCommProperties_t::for_version(version) else { return items };
    items.push(("sizeof(ncclCommProperties_t)".into(), properties.size as i64));
    let fields = offsets!(ncclCommProperties_t: size magic version rank nRanks cudaDev nvmlDev deviceApiSupport
        multimemSupport ginType nLsaTeams hostRmaSupport railedGinType commHash ginMinStride ginConnectionType
        ginSupport devCommRuntimeVersionSize cftSupport cftMulticastSupport cftCountedSupport);
    let used = ncclCommProperties_t::used(version);
    items.extend(fields.into_iter().filter(|(_, offset)| *offset < used as i64));
    if !since(29, 7) {
        let offset = offset_of!(ncclCommProperties_t, ginType_v22902) as i64;
        items.push(("offsetof(ncclCommProperties_t, ginType)".into(), offset));
    }
    let initial = "((ncclDevCommRequirements_t)NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER)";
    macro_rules! initials {
        ($($field:ident)*) => {
            [$((offset_of!(ncclDevCommRequirements_t, $field), stringify!($field), i64::from(requirements.$field))),*]
        };
    }
    let values = initials!(magic version lsaMultimem barrierCount lsaBarrierCount railGinBarrierCount
        lsaLLA2ABlockCount lsaLLA2ASlotCount ginForceEnable ginContextCount ginSignalCount ginCounterCount
        ginConnectionType ginExclusiveContexts ginQueueDepth ginTrafficClass worldGinBarrierCount
        ginStrongSignalsRequired ginVaSignalsRequired ginCustomStride ginType useRuntimeVersion cftCaps
        cftBarrierCount);
    let there = values.into_iter().filter(|(offset, ..)| *offset < ncclDevCommRequirements_t::used(version));
    items.extend(there.map(|(_, field, value)| (format!("{initial}.{field}"), value)));
    let initial = "((ncclCommProperties_t)NCCL_COMM_PROPERTIES_INITIALIZER)";
    items.push((format!("{initial}.magic"), i64::from(properties.magic)));
    items.push((format!("{initial}.version"), i64::from(properties.version)));
    items
}

fn device_values(version: u32) -> Vec<Item> {
    let since = |minor, patch| version_code(2, minor, patch);
    [
        ("NCCL_GIN_CONNECTION_NONE", gin_connection::NONE, since(29, 7)),
        ("NCCL_GIN_CONNECTION_FULL", gin_connection::FULL, since(29, 7)),
        ("NCCL_GIN_CONNECTION_RAIL", gin_connection::RAIL, since(29, 7)),
        ("NCCL_GIN_CONNECTION_CUSTOM_STRIDE", gin_connection::CUSTOM_STRIDE, since(31, 0)),
        ("NCCL_GIN_TYPE_NONE", gin_type::NONE, since(29, 2)),
        ("NCCL_GIN_TYPE_PROXY", gin_type::PROXY, since(29, 2)),
        ("NCCL_GIN_TYPE_GDAKI", gin_type::GDAKI, since(29, 2)),
        ("NCCL_GIN_TYPE_GPI", gin_type::GPI, since(30, 7)),
        ("NCCL_GIN_TYPE_EFA_GDA", gin_type::EFA_GDA, since(31, 0)),
        ("NCCL_CFT_TEAM_FLAT", cft_team::FLAT, since(31, 0)),
        ("NCCL_CFT_TEAM_HIER_MULTIMEM", cft_team::HIER_MULTIMEM, since(31, 0)),
        ("NCCL_CFT_TEAM_HIER_LSA", cft_team::HIER_LSA, since(31, 0)),
        ("NCCL_CFT_NONE", cft_caps::NONE, since(31, 0)),
        ("NCCL_CFT", cft_caps::CFT, since(31, 0)),
        ("NCCL_CFT_MULTIMEM", cft_caps::MULTIMEM, since(31, 0)),
    ]
    .into_iter()
    .filter(|(.., since)| *since <= version)
    .map(|(name, value, _)| (name.into(), i64::from(value)))
    .collect()
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
        ("NCCL_WIN_STRICT_ORDERING", NCCL_WIN_STRICT_ORDERING, since(29, 7)),
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
fn evaluate(release: &Release, header: Header, items: &[Item]) -> Result<Vec<i64>, String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let path = |name: &str| folder.path().join(name);
    let write = |path: &Path, text: &str| std::fs::write(path, text).map_err(|error| error.to_string());
    for (name, text) in CUDA_HEADERS.into_iter().chain([DRIVER_HEADER]) {
        write(&path(name), text)?;
    }
    let mut source = String::from(
        "#define NCCL_OS_LINUX 1\n#include <stddef.h>\n#include <stdio.h>\n#include <stdint.h>\n#include <nccl.h>\n",
    );
    let (compiler, standard) = match header {
        Header::Nccl => ("cc", "-std=gnu11"),
        Header::Device => {
            // Declarations alone, without what is inlined; since 2.32 the host's are in a file of their own.
            source += "#if __has_include(<nccl_device/host.h>)\n#include <nccl_device/host.h>\n#else\n";
            source += "#include <nccl_device/impl/comm__types.h>\n#endif\n";
            source +=
                "template<class F> char (&is_there(F*))[2];\ntemplate<class F> char (&is_there(...))[1];\n";
            ("c++", "-std=gnu++17")
        }
    };
    source += "int main(void) {\n";
    for (expression, _) in items {
        source += &format!("  printf(\"%lld\\n\", (long long)({expression}));\n");
    }
    source += "  return 0;\n}\n";
    let name = if header == Header::Nccl { "items.c" } else { "items.cc" };
    write(&path(name), &source)?;

    let compiled = run(Command::new(compiler)
        .args([standard, "-I"])
        .args([folder.path(), Path::new("-I"), &release.include(), &path(name), Path::new("-o")])
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

/// Functions that the headers have and the bindings have not, and the other way round.
fn functions_that_differ(release: &Release, of_devices: &BTreeSet<String>) -> Result<Vec<String>, String> {
    let header = release.header_text()?;
    let mut declared: BTreeSet<&str> = header.lines().filter_map(declared_function).collect();
    declared.extend(of_devices.iter().map(String::as_str));
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

/// The host's functions that the device API's headers declare; none before 2.28.
fn declared_for_devices(release: &Release) -> Result<BTreeSet<String>, String> {
    let mut declared = BTreeSet::new();
    let Ok(files) = std::fs::read_dir(release.include().join("nccl_device")) else { return Ok(declared) };
    for file in files {
        let path = file.map_err(|error| error.to_string())?.path();
        if path.is_file() {
            let text =
                std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
            declared.extend(exported(&text).filter(|name| !UNBOUND_OF_DEVICES.contains(&name.as_str())));
        }
    }
    Ok(declared)
}

/// The functions with C names in a header that are not inlined.
fn exported(header: &str) -> impl Iterator<Item = String> {
    // A macro's definition is followed by a space, too, but not by a parenthesis on its line.
    let declarations = header.split("NCCL_EXTERN_C ").skip(1);
    declarations.filter_map(|rest| {
        let (before, _) = rest.split_once('(')?;
        let is_one = !before.contains(['#', '"']) && !before.contains("INLINE");
        let name = before.rsplit(|byte: char| byte.is_whitespace() || byte == '*').next()?;
        (is_one && name.starts_with("nccl")).then(|| name.to_owned())
    })
}
