// Writes numbers and durations as makeway_api/{quantities,durations}.py do: "0.5", "7,912", "1 min 30 s".
const UNITS = [
  ["d", 86400],
  ["h", 3600],
  ["min", 60],
  ["s", 1],
];

export const number = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 3 });

export function duration(seconds) {
  if (seconds >= 0.05 && seconds < 0.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.max(0, Math.round(seconds));
  for (let i = 0; i < UNITS.length - 1; i += 1) {
    const [unit, length] = UNITS[i];
    if (whole < length) continue;
    const [smaller, smallerLength] = UNITS[i + 1];
    const rest = Math.floor((whole % length) / smallerLength);
    return `${Math.floor(whole / length)} ${unit}${rest ? ` ${rest} ${smaller}` : ""}`;
  }
  return `${whole} s`;
}
